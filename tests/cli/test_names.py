"""Tests of names that are not text, in arguments, in output and in lists (N4 in
tests/FAULTS.md)."""

import json
import os
from pathlib import Path

import pytest

from tests.trees import write

from .conftest import Dlcmd

text = os.fsdecode

NAMES = [
    b"\xff",
    b"\xed\xa0\x80 high",
    b"\xed\xb3\xbf low",
    b"\xc3",
    b"\xc0\xae" * 2,
    b"\xe2\x80\xae",
]
"""Names that are not UTF-8: a stray byte, surrogates, a cut character, an overlong `..`; and
right-to-left text."""


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A folder of files and links with such names; each file contains its own name."""
    source = write(tmp_path / text(b"src \xff"), {text(name): name for name in NAMES})
    for name in NAMES:
        (source / text(b"l" + name)).symlink_to(text(name))
    return source


def test_N4_addresses_and_listings_are_bytes(dlcmd: Dlcmd, odd: Path) -> None:
    dlcmd("put", odd, "ds")
    out = dlcmd.program("ls", "ds").out
    assert sorted(out.splitlines()) == sorted([*NAMES, *(b"l" + name for name in NAMES)])
    for name in NAMES:
        assert dlcmd("cat", f"ds/{text(name)}").out == name
        dlcmd("stat", f"ds/l{text(name)}")
    dlcmd("rm", *(f"ds/{text(name)}" for name in NAMES))
    assert len(dlcmd("ls", "ds").out.splitlines()) == len(NAMES)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_N4_errors_and_json_are_text(
    dlcmd: Dlcmd, odd: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    os.mkfifo(odd / text(b"\xff\x1b[31m pipe"))
    result = dlcmd.program("put", "--json", odd, "ds", code=3)
    (failed,) = json.loads(result.out.splitlines()[-1])["failed"]
    assert "pipe" in failed["path"]
    assert "pipe" in result.err
    assert "\x1b" not in result.err
    listed = dlcmd.program("ls", "--json", "ds").out.splitlines()
    assert len({json.dumps(json.loads(line)) for line in listed}) == 2 * len(NAMES)
    for verb in (("ls", "-R"), ("ls", "-l"), ("stat",), ("du",)):
        assert dlcmd(*verb, "--json", "ds").objects
    for name in (b"\xed\xa0\x80", b"\xfe", b"\x1b[31m"):
        for verb in (("cat",), ("stat",), ("rm",)):
            err = dlcmd(*verb, f"ds/gone {text(name)}", code=10).err
            assert (len(err.splitlines()), "\x1b" in err) == (1, False)


def test_N4_lists_and_filters_take_bytes(dlcmd: Dlcmd, odd: Path) -> None:
    names = odd.with_name("names")
    names.write_bytes(b"\0".join(NAMES[:3]))
    dlcmd("put", "--files-from", names, "-0", odd, "listed")
    assert sorted(dlcmd("ls", "listed").out.splitlines()) == sorted(NAMES[:3])
    filters = [text(word) for word in (b"--include=\xff", b"--include=*\x80*", b"--exclude=l*")]
    dlcmd("put", *filters, odd, "chosen")
    chosen = sorted(name for name in NAMES if name == b"\xff" or b"\x80" in name)
    assert sorted(dlcmd("ls", "chosen").out.splitlines()) == chosen
    assert len(chosen) == 3


def test_I11_a_path_that_is_listed_twice_is_put_once(dlcmd: Dlcmd, odd: Path) -> None:
    names = odd.with_name("names")
    names.write_bytes(b"\xff\n./\xff\n\xff\n\xff/\n\xc3\n")
    done = dlcmd("put", "--json", "--files-from", names, odd, "ds").objects[-1]
    assert (done["files"], done["bytes"], done["failed"]) == (2, 2, [])


def test_N4_a_repositorys_folder_must_be_text(dlcmd: Dlcmd, odd: Path, tmp_path: Path) -> None:
    store = tmp_path / text(b"store \xff\xed\xa0\x80")
    before = sorted(os.listdir(os.fsencode(tmp_path)))
    result = dlcmd("put", "--url", store.as_uri(), odd, "ds", code=2)
    assert result.err.startswith("dlcmd: bad repository URL")
    assert len(result.err.splitlines()) == 1
    assert sorted(os.listdir(os.fsencode(tmp_path))) == before
