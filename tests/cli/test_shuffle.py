"""Tests of `dlcmd shuffle`: it prints the order of the library in a form that scripts can read."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict
from xml.etree import ElementTree as ET

import pytest

from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.orders.quality import compare_group_sizes
from diesel_fs.orders.shuffle import chunk_shuffle, full_shuffle
from diesel_fs.repository.local import LocalRepository
from tests.trees import write

from .conftest import Dlcmd

NUMBERS = ("--seed", "7", "--epoch", "3")


class Printed(TypedDict):
    files: int
    classes: int
    batch_files: int
    by_group_size: list[dict[str, float | None]]
    full: dict[str, float | None]
    recommended_group_size: int | None


@pytest.fixture(autouse=True)
def view(dlcmd: Dlcmd, tmp_path: Path) -> Iterator[Snapshot]:
    files = {f"train/c{n % 5}/{n:03}.jpg": os.urandom(2000) for n in range(300)}
    files |= {f"val/{n:03}.jpg": b"v" for n in range(20)}
    dlcmd("put", write(tmp_path / "src", files), "pets", "--chunk-size", "64K")
    with LocalRepository.open(dlcmd.store.as_uri()) as repository:
        yield repository.view("pets")


def test_shuffle_prints_the_order_of_the_library(dlcmd: Dlcmd, view: Snapshot) -> None:
    assert view.chunk_count > 8
    expected = view.paths(chunk_shuffle(view, 7, 3))
    assert dlcmd("shuffle", "pets", *NUMBERS).out == b"".join(p + b"\n" for p in expected)
    assert dlcmd("shuffle", "pets", *NUMBERS, "-0").out == b"".join(p + b"\0" for p in expected)
    described = dlcmd("shuffle", "pets", *NUMBERS, "--json").objects
    assert [each["path"] for each in described] == [path.decode() for path in expected]
    full = view.paths(full_shuffle(view, 7, 3))
    assert dlcmd("shuffle", "pets", *NUMBERS, "--full").out.split(b"\n")[:-1] == full
    part = chunk_shuffle(view, 7, 3, group_size=2, rank=2, world=3, drop_last=True)
    options = ("--group-size", "2", "--rank", "2", "--world", "3", "--drop-last")
    assert dlcmd("shuffle", "pets", *NUMBERS, *options).out.split(b"\n")[:-1] == view.paths(part)
    assert len(part) == 320 // 3


def test_shuffle_of_a_folder_prints_paths_from_the_root(dlcmd: Dlcmd, view: Snapshot) -> None:
    lines = dlcmd("shuffle", "pets/val/", *NUMBERS).out.splitlines()
    assert sorted(lines) == [b"val/%03d.jpg" % n for n in range(20)]
    expected = chunk_shuffle(view, 7, 3, below=view.lookup(b"val"))
    assert lines == view.paths(expected)


def test_another_process_prints_the_same(dlcmd: Dlcmd) -> None:
    arguments = ("shuffle", "pets", *NUMBERS, "--group-size", "3")
    assert dlcmd.program(*arguments).out == dlcmd(*arguments).out


def test_quality_compares_group_sizes(dlcmd: Dlcmd, view: Snapshot, tmp_path: Path) -> None:
    arguments = ("shuffle", "pets/train", *NUMBERS, "--group-size", "2", "--quality")
    top = view.lookup(b"train")
    report = compare_group_sizes(view, 7, 3, 2, below=top)
    parsed: Printed = json.loads(dlcmd(*arguments, "--json").out.splitlines()[-1])
    assert (parsed["files"], parsed["classes"], parsed["batch_files"]) == (300, 5, 37)
    sizes = [1, 2, 3] if report.chunks <= 10 else [1, 2, 3, 10]
    assert [each["group_size"] for each in parsed["by_group_size"]] == sizes
    two = report.by_group_size[2]
    assert parsed["by_group_size"][1] == {
        "group_size": 2, "memory_bytes": two.memory_bytes, "chunks_in_batch": two.chunks_in_batch,
        "design_effect": two.design_effect, "effective_batch_files": 37 / (two.design_effect or 1),
    }  # fmt: skip
    assert parsed["full"]["memory_bytes"] == report.full.memory_bytes > two.memory_bytes
    printed = dlcmd(*arguments)
    rows = [line.split("\t") for line in printed.out.decode().splitlines()]
    assert [row[0] for row in rows] == ["no shuffle", *(f"G = {n}" for n in sizes), "full shuffle"]
    assert rows[2][3] == f"{two.design_effect:.2f}"
    assert parsed["recommended_group_size"] is None  # each chunk has one class or two
    assert "no group size" in printed.err
    dlcmd("put", write(tmp_path / "mixed", {f"c{n % 5}{n}/{n}": b"x" for n in range(30)}), "tiny")
    advice = dlcmd("shuffle", "tiny", *NUMBERS, "--quality").err
    assert "30 files of 30 classes in 1 chunk, batches of 3: with --group-size 100 (" in advice
    assert "classes mean nothing" in dlcmd("shuffle", "pets/val", *NUMBERS, "--quality").err


def test_a_plot_shows_each_group_size(dlcmd: Dlcmd, view: Snapshot, tmp_path: Path) -> None:
    plot = tmp_path / "pets.svg"
    arguments = ("shuffle", "pets/train", *NUMBERS, "--group-size", "2", "--quality")
    printed = dlcmd(*arguments, "--plot", str(plot))
    assert printed.out == dlcmd(*arguments).out
    drawn = ET.fromstring(plot.read_text())  # noqa: S314  # it is our own
    names = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}title")]
    sizes = list(compare_group_sizes(view, 7, 3, 2, below=view.lookup(b"train")).by_group_size)
    assert names[0] == "pets/train: how well chunk-wise orders mix"
    assert [str(name).partition(":")[0] for name in names[1:]] == [f"G = {n}" for n in sizes]
    for order in ("full shuffle", "no shuffle"):
        assert order in " ".join(drawn.itertext())
    assert "--quality" in dlcmd("shuffle", "pets", *NUMBERS, "--plot", plot, code=2).err
    assert "FILE.svg" in dlcmd(*arguments, "--plot", tmp_path / "pets.png", code=2).err
    there = tmp_path / "nowhere" / "pets.svg"
    assert str(there) in dlcmd(*arguments, "--plot", str(there), code=12).err


def test_N4_names_with_a_newline_need_nul(dlcmd: Dlcmd, tmp_path: Path) -> None:
    source = write(tmp_path / "odd", {"a/x": b"1", "b\nb/y": b"2", "a/\udcff": b"3"})
    dlcmd("put", source, "odd")
    result = dlcmd("shuffle", "odd", *NUMBERS, code=2)
    assert result.out == b""
    assert "-0" in result.err
    assert len(result.err.splitlines()) == 1
    names = sorted(dlcmd("shuffle", "odd", *NUMBERS, "-0").out.split(b"\0"))
    assert names == [b"", b"a/x", b"a/\xff", b"b\nb/y"]
    assert sorted(dlcmd("shuffle", "odd/a", *NUMBERS).out.splitlines()) == [b"a/x", b"a/\xff"]
    lines = dlcmd("shuffle", "odd", *NUMBERS, "--json").out.splitlines()
    assert {json.loads(line)["path"] for line in lines} >= {"a/x", "b\nb/y"}


def test_bad_numbers_and_addresses_are_refused(dlcmd: Dlcmd) -> None:
    for words in (
        ("pets",),
        ("pets", "--seed", "1"),
        ("pets", "--seed", "-1", "--epoch", "0"),
        ("pets", "--seed", "1", "--epoch", str(2**63)),
        ("pets", "--seed", "x", "--epoch", "0"),
        ("pets", *NUMBERS, "--group-size", "0"),
        ("pets", *NUMBERS, "--rank", "2", "--world", "2"),
        ("pets/val/001.jpg", *NUMBERS),
    ):
        result = dlcmd("shuffle", *words, code=2)
        assert result.out == b""
        assert len(result.err.splitlines()) == 1
    dlcmd("shuffle", "pets/nowhere", *NUMBERS, code=10)
    dlcmd("shuffle", "nothing", *NUMBERS, code=10)
