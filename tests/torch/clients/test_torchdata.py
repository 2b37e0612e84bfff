"""torchdata's `StatefulDataLoader` keeps and loads the state of a `ChunkShuffleSampler`."""

import subprocess
from pathlib import Path

import pytest

from tests.torch.stores import packed
from tests.trees import write

SCRIPT = Path(__file__).with_name("torchdata_resume.py")
PYTHON = Path(__file__).parents[3] / ".venv" / "clients" / "bin" / "python"
DEADLINE_S = 280


@pytest.mark.parametrize("workers", [0, 2])
def test_it_resumes_at_each_batch(workers: int, tmp_path: Path) -> None:
    files = {f"c{n % 3}/{n:03}.bin": bytes([n]) * 9000 for n in range(30)}
    url = packed(write(tmp_path / "src", files), tmp_path / "store")
    ended = subprocess.run(
        [PYTHON, "-W", "ignore", SCRIPT, url, str(workers)],
        text=True, capture_output=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert (ended.stdout, ended.returncode) == ("ok\n", 0), ended.stderr
