"""`python -m tests.fuzz TARGET CORPUS [libFuzzer's options]`: fuzzes one target until a finding.

Without arguments it names the targets. The corpus is a folder, which gets the target's seeds first
and grows; `-max_total_time=60` ends it.
"""

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["diesel_fs"]):
    from tests.fuzz.targets import TARGETS, seeds


def main() -> None:
    """Does not return: libFuzzer ends the process, with 77 after a finding."""
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
