"""`python -m tests.fuzz TARGET CORPUS [options of libFuzzer]`: fuzzes one target until a finding.

Without arguments it prints the names of the targets. The corpus is a folder; it first gets the
target's seeds, and grows. `-max_total_time=60` ends the run after a minute.
"""

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["diesel_fs"]):
    from tests.fuzz.targets import TARGETS, seeds


def main() -> None:
    """Fuzz. This does not return: libFuzzer ends the process, with exit code 77 after a finding."""
    if len(sys.argv) == 1:
        print(*TARGETS, sep="\n")
        return
    if len(sys.argv) < 3 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: python -m tests.fuzz {'|'.join(TARGETS)} CORPUS [options]")
    name, corpus = sys.argv.pop(1), Path(sys.argv[1])
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds()[name]):
        (corpus / f"seed-{number}").write_bytes(seed)
    atheris.Setup(sys.argv, TARGETS[name])
    atheris.Fuzz()


main()
