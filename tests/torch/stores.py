"""Makes a repository with one dataset of small chunks, for tests that need no mount."""

from pathlib import Path

from dlcmd.main import run


def packed(folder: Path, store: Path, name: str = "pets") -> str:
    url = store.as_uri()
    assert run(["-q", "--url", url, "put", "--chunk-size", "64K", str(folder), name]) == 0
    return url
