"""Runs each target of the fuzzer for a few seconds. (`make fuzz` runs them for minutes.)"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS, seeds

SECONDS = 3
RUNS_MIN = 200


def test_seeds_are_accepted() -> None:
    """With bad seeds the fuzzer would first have to discover what a message is."""
    assert seeds().keys() == TARGETS.keys()
    for name, target in TARGETS.items():
        for number, seed in enumerate(seeds()[name]):
            assert target(seed), (name, number)
        assert not target(b"\xff" * 100), name


@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris has no wheel for this Python"
)
@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes_are_a_value_or_a_format_error(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz", name, str(tmp_path / "corpus")]
    # The instrumented modules alone take 1 GiB
    options = [f"-max_total_time={SECONDS}", "-timeout=10", "-rss_limit_mb=2048", "-max_len=65536"]
    done = subprocess.run(
        [*command, *options, f"-artifact_prefix={tmp_path}/"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.search(r"Done (\d+) runs", done.stderr)
    assert found is not None
    assert int(found[1]) >= RUNS_MIN
