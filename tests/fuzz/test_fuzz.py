"""Runs each target of the fuzzer for a few seconds. (`make fuzz` runs them for minutes.)"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS, seeds

pytestmark = pytest.mark.deep

SECONDS = 3
RUNS_MIN = 200
DEADLINE_S = 120.0

Fuzz = Callable[[Sequence[str | Path]], int]
"""Does a run of the fuzzer with these arguments. Returns its exit code."""


def test_seeds_are_accepted() -> None:
    """With bad seeds the fuzzer would first have to discover the form of a message."""
    found = seeds()
    assert found.keys() == TARGETS.keys()
    for name, target in TARGETS.items():
        for number, seed in enumerate(found[name]):
            assert target(seed), (name, number)
        assert not target(b"\xff" * 100), name


@pytest.fixture(scope="module")
def fuzz() -> Iterator[Fuzz]:
    """Runs in a process that has instrumented the modules once."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.fuzz", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "0"},
    ) as process:
        requests, answers = process.stdin, process.stdout
        assert requests is not None
        assert answers is not None

        def run(arguments: Sequence[str | Path]) -> int:
            timer = threading.Timer(DEADLINE_S, process.kill)
            timer.start()
            try:
                print(json.dumps([*map(str, arguments)]), file=requests, flush=True)
                return int(answers.readline())
            finally:
                timer.cancel()

        yield run


@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris has no wheel for this Python"
)
@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes_are_a_value_or_a_format_error(name: str, fuzz: Fuzz, tmp_path: Path) -> None:
    log = tmp_path / "log"
    # The instrumented modules alone take 1 GiB
    options = [f"-max_total_time={SECONDS}", "-timeout=10", "-rss_limit_mb=2048", "-max_len=65536"]
    options.append(f"-artifact_prefix={tmp_path}/")
    code = fuzz([log, name, tmp_path / "corpus", *options])
    output = log.read_text(errors="replace")
    assert code == 0, output[-4000:]
    found = re.search(r"Done (\d+) runs", output)
    assert found is not None
    assert int(found[1]) >= RUNS_MIN
