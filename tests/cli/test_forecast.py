"""Tests of `dlcmd forecast`: it prints the library's forecasts, and refuses senseless options."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from diesel_fs.errors import DieselError
from diesel_fs.forecast.kept import NAMES, OnProgress
from diesel_fs.forecast.nodes import ForecastJob, ForecastNode
from diesel_fs.forecast.reads import ForecastFiles
from diesel_fs.format.snapshot.reader import Indices, Snapshot
from diesel_fs.repository.local import LocalRepository
from dlcmd.simulations import Comparison, compare
from tests.rows import each_row
from tests.trees import write

from .conftest import Dlcmd

SIZES = ("--memory", "2M", "--cache-size", "400K")
SVG = "{http://www.w3.org/2000/svg}"


class Epoch(TypedDict):
    files: dict[str, int]
    bytes: dict[str, int]
    stall_s: list[float]


class Row(TypedDict):
    policy: str
    shuffle: str
    layout: str
    seconds: float
    smallest_cache_bytes: int | None
    epochs: list[Epoch]


class Printed(TypedDict):
    files: int
    bytes: int
    assumed: list[str]
    forecasts: list[Row]
    recommended: dict[str, str | list[str]]


@pytest.fixture(autouse=True)
def view(dlcmd: Dlcmd, tmp_path: Path) -> Iterator[Snapshot]:
    files = {f"c{n % 5}/{n:03}.jpg": os.urandom(3000) for n in range(300)}
    dlcmd("put", write(tmp_path / "src", files), "pets", "--chunk-size", "64K")
    with LocalRepository.open(dlcmd.store.as_uri()) as repository:
        yield repository.view("pets")


def test_plan_compares_all_policies_in_both_orders(dlcmd: Dlcmd, view: Snapshot) -> None:
    parsed: Printed = json.loads(
        dlcmd("forecast", "pets", *SIZES, "--ranks", "2", "--json").out.splitlines()[-1]
    )
    assert (parsed["files"], parsed["bytes"]) == (view.file_count, view.byte_count)
    rows = parsed["forecasts"]
    names = [(row["shuffle"], row["policy"]) for row in rows]
    assert names == [(order, name) for order in ("full", "chunk") for name in NAMES]
    assert {row["layout"] for row in rows if row["policy"] == "order"} == {"log"}
    for row in rows:
        assert len(row["epochs"]) == 3
        for epoch in row["epochs"]:
            assert sum(epoch["files"].values()) == 300
            assert sum(epoch["bytes"].values()) == view.byte_count
            assert len(epoch["stall_s"]) == 2
    best = next(
        row for row in rows
        if row["policy"] == parsed["recommended"]["policy"]
        and row["shuffle"] == parsed["recommended"]["shuffle"]
    )  # fmt: skip
    assert best["seconds"] <= 1.02 * min(row["seconds"] for row in rows)
    assert "--batch 64" in parsed["assumed"]
    assert not [each for each in parsed["assumed"] if each.startswith(("--ranks", "--memory"))]
    printed = dlcmd("forecast", "pets", *SIZES, "--ranks", "2")
    sentence, *lines = printed.out.decode().splitlines()
    assert sentence == parsed["recommended"]["text"]
    assert [tuple(line.split("\t")[:2]) for line in lines[:10]] == names
    assert lines[10:] == parsed["recommended"]["commands"]
    assert lines[10].startswith("dlcmd mount pets /mnt/pets --memory 2M ")
    assert "--cache-size 400K" in lines[10]
    assert "assumed: --nodes 1, --batch 64" in printed.err
    assert "the cache keeps whole chunks" in printed.err
    assert "the memory to load ahead is 401.4 kB" in printed.err
    assert "load ahead" not in dlcmd("forecast", "pets", "--memory", "20M").err


def test_another_process_plans_the_same(dlcmd: Dlcmd) -> None:
    arguments = ("forecast", "pets", *SIZES, "--evict", "plan", "--evict", "lfu", "--nodes", "3")
    printed = dlcmd(*arguments)
    assert dlcmd.program(*arguments).out == printed.out
    assert len(printed.out.splitlines()) == 7
    assert '--task "$JOB" --rank "$NODE" --world 3' in printed.out.decode()


def test_without_a_disk_there_is_no_order_log(dlcmd: Dlcmd) -> None:
    parsed: Printed = json.loads(
        dlcmd("forecast", "pets", "--shuffle", "full", "--json").out.splitlines()[-1]
    )
    assert [row["policy"] for row in parsed["forecasts"]] == [*NAMES[:-1]]
    assert any("measured here" in each for each in parsed["assumed"])
    refused = dlcmd("forecast", "pets", "--evict", "order", code=2)
    assert "--evict order needs an SSD" in refused.err


def test_the_smallest_cache_is_one_with_which_nothing_waits(dlcmd: Dlcmd) -> None:
    """The store alone is too slow for the model, and an SSD is not."""
    arguments = ("forecast", "pets", "--memory", "2M", "--evict", "order", "--shuffle", "full",
                 "--store-bandwidth", "200K", "--images-per-s", "100", "--batch", "4",
                 "--json")  # fmt: skip
    parsed: Printed = json.loads(
        dlcmd(*arguments, "--cache-size", "1K", "--smallest").out.splitlines()[-1]
    )
    least = parsed["forecasts"][0]["smallest_cache_bytes"]
    assert least
    again: Printed = json.loads(dlcmd(*arguments, "--cache-size", str(least)).out.splitlines()[-1])
    waited = [max(row["epochs"][-1]["stall_s"]) for row in parsed["forecasts"] + again["forecasts"]]
    assert waited[0] > 0.1 > waited[1]
    printed = dlcmd(*arguments[:-1], "--cache-size", "1K", "--smallest").out.decode()
    assert printed.splitlines()[1].split("\t")[-1] != "none"


def test_a_page_has_a_plot_of_each_kind(dlcmd: Dlcmd, tmp_path: Path) -> None:
    page = tmp_path / "pets.html"
    arguments = ("forecast", "pets", *SIZES, "--evict", "lru", "--evict", "order", "--ranks", "3")
    printed = dlcmd(*arguments, "--html", page)
    text = page.read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert text.count("<svg ") == 4
    drawn = ET.fromstring(text.partition("\n")[2].replace('<meta charset="utf-8">', ""))  # noqa: S314
    plots = [*drawn.iter(f"{SVG}svg")]
    bars = [len([*plot.iter(f"{SVG}rect")]) for plot in plots]
    assert bars == [4 * 2, 4 * 4, 4, 3]
    for line in printed.out.decode().splitlines()[-2:]:
        assert line in "".join(drawn.itertext())
    there = tmp_path / "nowhere" / "pets.html"
    assert str(there) in dlcmd(*arguments, "--html", there, code=12).err


@each_row(
    ("words", "begins", "mount"),
    [
        (
            ["--memory", "20M"],
            "fits in the memory of one machine, so the machines need not share",
            "--memory 20M",
        ),
        (
            ["--memory", "20M", "--nodes", "2"],
            "fits in memory of the 2 machines together, so later epochs read nothing",
            '--memory 20M --evict plan --task "$JOB" --rank "$NODE" --world 2',
        ),
        (
            ["--memory", "1M", "--cache-size", "20M", "--evict", "plan"],
            "fits in memory and SSD of the machine",
            "--memory 1M --evict plan --cache-dir /var/cache/diesel --cache-size 20M",
        ),
        (
            ["--memory", "1M", "--evict", "plan"],
            "does not fit in memory of the machine: a later epoch reads",
            '--memory 1M --evict plan --task "$JOB" --rank 0 --world 1',
        ),
    ],
)
def test_the_first_line_has_the_recommended_options(
    dlcmd: Dlcmd, words: list[str], begins: str, mount: str
) -> None:
    printed = dlcmd("forecast", "pets", "--shuffle", "full", *words).out.decode().splitlines()
    command = f"dlcmd mount pets /mnt/pets {mount}"
    assert printed[0].startswith(f"pets (900.0 kB) {begins}")
    assert printed[0].endswith(f"`{command}`")
    assert printed[-2] == command


def test_an_order_can_be_given(dlcmd: Dlcmd, view: Snapshot, tmp_path: Path) -> None:
    order = tmp_path / "order"
    some = view.paths(view.files()[:100][::-1])
    order.write_bytes(b"".join(path + b"\n" for path in some))
    arguments = ("forecast", "pets", *SIZES, "--evict", "lru", "--ranks", "1", "--order", order)
    parsed: Printed = json.loads(dlcmd(*arguments, "--json").out.splitlines()[-1])
    assert [sum(row["epochs"][0]["files"].values()) for row in parsed["forecasts"]] == [100]
    printed = dlcmd(*arguments).out.decode().splitlines()
    assert printed[1].startswith("given\tlru\t")
    assert printed[-1] == "dlcmd run -- python train.py"
    for content, code, problem in (
        (b"", 2, "is empty"), (b"c0/000.jpg\nno such\n", 10, "line 2 of"), (b"c0\n", 2, "no file"),
    ):  # fmt: skip
        order.write_bytes(content)
        assert problem in dlcmd(*arguments, code=code).err
    assert "cannot read" in dlcmd(*arguments[:-1], tmp_path / "absent", code=2).err


@each_row(
    ("words", "problem"),
    [
        (("--nodes", "0"), "bad number of nodes 0"),
        (("--ranks", "-1"), "bad number of ranks -1"),
        (("--batch", "0"), "bad batch 0"),
        (("--epochs", "0"), "bad number of epochs 0"),
        (("--group-size", "0"), "bad group size 0"),
        (("--seed", "-1"), "bad seed -1"),
        (("--memory", "0"), "--memory 0 leaves no room"),
        (("--memory", "much"), "bad size 'much'"),
        (("--network", "0"), "the network's rate is 0"),
        (("--store-bandwidth", "0"), "the store's rate is 0"),
        (("--store-latency", "-1"), "the store's latency is -0.001"),
        (("--store-latency", "nan"), "--store-latency: 'nan' is no number; write it as 20"),
        (("--request-price", "-1"), "the price of requests is -1"),
        (("--images-per-s", "0"), "the rate of images is 0"),
        (("--evict", "fifo"), "'fifo' is not one of"),
        (("--shuffle", "none"), "'none' is not one of"),
    ],
)
def test_bad_options_are_refused(dlcmd: Dlcmd, words: tuple[str, str], problem: str) -> None:
    assert problem in dlcmd("forecast", "pets", *words, code=2).err


def test_a_path_that_is_no_dataset_is_refused(dlcmd: Dlcmd, tmp_path: Path) -> None:
    dlcmd("forecast", "dogs", code=10)
    assert "names a folder" in dlcmd("forecast", "pets/c0", code=2).err
    (tmp_path / "empty").mkdir()
    dlcmd("put", tmp_path / "empty", "nothing", "--allow-empty")
    assert "has no files" in dlcmd("forecast", "nothing", code=2).err


def fail(_: Comparison, __: ForecastFiles, ___: Indices | None, progress: OnProgress) -> int:
    progress(0.5)
    raise DieselError("it failed")


def end(_: Comparison, __: ForecastFiles, ___: Indices | None, progress: OnProgress) -> int:
    progress(0.5)
    os._exit(9)


def test_comparisons_in_several_processes_are_those_of_one(view: Snapshot) -> None:
    files = ForecastFiles.of(view)
    job = ForecastJob(ForecastNode(1 << 20, 1 << 18), ranks=2)
    some = [Comparison(name, job) for name in ("lru", "none", "plan")]
    shown: list[int] = []

    def show(done: int, total: int, content_bytes: int | None = None) -> None:
        assert (total, content_bytes) == (3000, None)
        shown.append(done)

    for order in (None, np.arange(len(files))):
        alone = compare(Comparison.run, some, files, order, show)
        assert shown == sorted(shown)
        assert shown[-1] == 3000
        assert compare(Comparison.run, some, files, order, show, processes=2) == alone
        shown.clear()
    for work, message in ((fail, "it failed"), (end, "has ended early")):
        with pytest.raises(DieselError, match=message):
            compare(work, some, files, None, show, processes=2)
