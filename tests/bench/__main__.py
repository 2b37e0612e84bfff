"""`python -m tests.bench [names...]`: runs benchmarks, prints one table, and writes it as JSON.

The exit code is 0 if everything was measured, whether or not the targets are met; 1 if a benchmark
failed or a peer is missing.
"""

import argparse
import json
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from . import results
from .benchmarks import BENCHMARKS, UNTIMED, Benchmark, chosen
from .machine import described, is_busy, machine
from .report import Json, Row, failed, table
from .samples import progress
from .workbench import NATIVE, Workbench

ROUNDS = 5
ROUNDS_QUICK = 1
DURATION_S_MAX = 150 * 60  # benchmarks that have not begun then count as failed
TREE = Path(__file__).resolve().parents[2]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "names", nargs="*", help=f"run only benchmarks that begin so: {', '.join(BENCHMARKS)}"
    )
    parser.add_argument("--quick", action="store_true", help=f"{ROUNDS_QUICK} round, not {ROUNDS}")
    parser.add_argument(
        "--session",
        default=NATIVE,
        help="the session that the group native measures; default: %(default)s",
    )
    parser.add_argument(
        "--json", type=Path, default=TREE / "build" / "bench.json", help="default: %(default)s"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="work in DIR, and keep the input files there"
    )
    parser.add_argument("--divisor", type=int, default=1, help=argparse.SUPPRESS)  # smaller inputs
    options = parser.parse_args()
    try:
        chosen(options.names)
    except KeyError as error:
        parser.error(f"no benchmark is named {error}: the names are {', '.join(BENCHMARKS)}")
    return options


@contextmanager
def workbench(options: argparse.Namespace, rounds: int) -> Iterator[Workbench]:
    """A bench in the folder `--keep`, or in a temporary one on a disk, which is removed."""
    with TemporaryDirectory(prefix="diesel-bench-", dir="/var/tmp") as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        bench = Workbench(folder, rounds, options.divisor, session=options.session)
        try:
            yield bench
        finally:
            bench.close()


def run_all(bench: Workbench, benchmarks: Mapping[str, Benchmark]) -> dict[str, list[Row]]:
    """The rows of each benchmark; one that fails does not stop the others."""
    rows: dict[str, list[Row]] = {}
    end_s = time.monotonic() + DURATION_S_MAX
    for name, run in benchmarks.items():
        if time.monotonic() > end_s:
            rows[name] = [failed(name, "the time limit of the bench was reached")]
            continue
        print(f"{name}", file=sys.stderr, flush=True)
        start_s = time.monotonic()
        try:
            rows[name] = run(bench)
        except Exception as error:
            traceback.print_exc()
            rows[name] = [failed(name, f"{type(error).__name__}: {error}")]
        progress(f"{name} took {time.monotonic() - start_s:.0f} s")
    return rows


def lasting_rows(by_name: Mapping[str, list[Row]], *, whole: bool) -> list[Row]:
    """The rows for the page of results: all of a `whole` run, otherwise only those that depend
    neither on rounds nor on a busy machine."""
    return [row for name, rows in by_name.items() if whole or name in UNTIMED for row in rows]


def _terminate(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):  # an exception: mounts and files are removed
        signal.signal(number, _terminate)
    options = arguments()
    began, rounds = datetime.now(UTC), ROUNDS_QUICK if options.quick else ROUNDS
    busy = is_busy()
    try:
        with workbench(options, rounds) as bench:
            before = machine(bench.folder)
            by_name = run_all(bench, chosen(options.names))
            after = machine(bench.folder)
    except KeyboardInterrupt:
        print("bench: interrupted; cleaned up", file=sys.stderr)
        return 128 + signal.SIGINT
    rows = [row for each in by_name.values() for row in each]
    document: dict[str, Json] = {
        "began": began.isoformat(timespec="seconds"),
        "seconds": round((datetime.now(UTC) - began).total_seconds()),
        "rounds": rounds,
        "divisor": options.divisor,
        "machine": {"before": before, "after": after},
        "busy": busy,
        "rows": [row.as_json() for row in rows],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"\n{described(before)}\nMedians of {rounds}, {began:%Y-%m-%d}.\n\n{table(rows)}\n")
    if options.divisor > 1:
        print(f"The inputs were {options.divisor} times smaller: these figures mean nothing.")
    if busy:
        print("The machine was busy at the start: these figures mean little.")
    print(f"As JSON, with every sample: {options.json}")
    whole = rounds == ROUNDS and options.session == NATIVE and not busy
    lasting = lasting_rows(by_name, whole=whole) if options.divisor == 1 else []
    if lasting:
        results.update(results.PAGE, lasting, f"{began:%Y-%m-%d}, {before['diesel_fs']}")
        print(f"The table of results is up to date: {results.PAGE}")
    return 1 if any(row.problems for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
