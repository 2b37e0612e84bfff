"""Reads files as ordinary Python code does; it runs in any Python 3.11 or later.

    python loops_program.py LIST PROCESSES LOOP [FOLDER]

LIST holds NUL-terminated paths, LOOP is a key of `LOOPS`. It prints a line when it is ready, and
waits for one. Then it walks FOLDER, and PROCESSES processes read their shares of the list. At the
end it prints a report as JSON: the counts of files and bytes, the seconds from the first open to
the last close, when that was (`time.monotonic()`), and the number of entries of the walk.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence

PIECE_BYTES = 1 << 20


def stock(paths: Sequence[str]) -> int:
    """The loop that people write: `open().read()`. Returns the number of bytes."""
    total = 0
    for path in paths:
        with open(path, "rb") as file:
            total += len(file.read())
    return total


def system_calls(paths: Sequence[str]) -> int:
    """The same with `os.open`, which makes fewer requests to the kernel than `open`."""
    total = 0
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        total += len(os.read(descriptor, os.fstat(descriptor).st_size))
        os.close(descriptor)
    return total


def pieces(paths: Sequence[str]) -> int:
    """Large files from begin to end, in pieces of one MiB."""
    total, buffer = 0, bytearray(PIECE_BYTES)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total


LOOPS: dict[str, Callable[[Sequence[str]], int]] = {
    "open().read()": stock,
    "os.open": system_calls,
    "pieces of 1 MiB": pieces,
}


def in_processes(
    loop: Callable[[Sequence[str]], int], paths: Sequence[str], processes: int
) -> list[dict[str, float]]:
    """Run the loop in processes that begin together; returns their reports."""
    gate, gate_end = os.pipe()
    reports, reports_end = os.pipe()
    for number in range(processes):
        if os.fork():
            continue
        os.close(gate_end)
        share = paths[number::processes]
        os.read(gate, 1)
        start_s = time.monotonic()
        total = loop(share)
        report = {"files": len(share), "bytes": total, "start": start_s, "end": time.monotonic()}
        os.write(reports_end, json.dumps(report).encode() + b"\n")
        os._exit(0)
    os.close(gate_end)
    os.close(reports_end)
    with open(reports) as lines:
        return [json.loads(line) for line in lines]


def main(listed: str, processes: str, loop: str, *folders: str) -> None:
    with open(listed, "rb") as file:
        paths = [os.fsdecode(path) for path in file.read().split(b"\0")[:-1]]
    print("ready", flush=True)
    sys.stdin.readline()
    walked = sum(len(inside) + len(names) for f in folders for _, inside, names in os.walk(f))
    done = in_processes(LOOPS[loop], paths, int(processes))
    start_s, end_s = min(each["start"] for each in done), max(each["end"] for each in done)
    report = {
        "files": sum(each["files"] for each in done),
        "bytes": sum(each["bytes"] for each in done),
        "seconds": end_s - start_s,
        "end_s": end_s,
        "walked": walked,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
