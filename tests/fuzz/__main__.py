"""`python -m tests.fuzz TARGET CORPUS [options of libFuzzer]`: fuzzes one target until a finding.

Without arguments it prints the names of the targets. The corpus is a folder; it first gets the
target's seeds, and grows. `-max_total_time=60` ends the run after a minute.

`python -m tests.fuzz -` does one run after the other, because instrumenting the modules takes
longer than a short run: each line of stdin is a JSON list of a file for libFuzzer's output and the
arguments of a run; the answer is a line with the run's exit code.
"""

import json
import os
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["diesel_fs"]):
    from tests.fuzz.targets import TARGETS, seeds


def main() -> None:
    match sys.argv[1:]:
        case []:
            print(*TARGETS, sep="\n")
        case ["-"]:
            for line in sys.stdin:
                print(_fuzz_in_child(*json.loads(line)), flush=True)
        case [name, corpus, *options] if name in TARGETS:
            _fuzz(name, corpus, *options)
        case _:
            sys.exit(f"usage: python -m tests.fuzz {'|'.join(TARGETS)} CORPUS [options]")


def _fuzz(name: str, corpus: str, *options: str) -> None:
    """Fuzz. This does not return: libFuzzer ends the process, with exit code 77 after a finding."""
    Path(corpus).mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds()[name]):
        Path(corpus, f"seed-{number}").write_bytes(seed)
    atheris.Setup([sys.argv[0], corpus, *options], TARGETS[name])
    atheris.Fuzz()


def _fuzz_in_child(log: str, *arguments: str) -> int:
    child = os.fork()
    if child == 0:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT, 0o600), 2)
        _fuzz(*arguments)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


main()
