"""The bench's own arithmetic: a wrong ratio or a peer that goes missing silently would be worse
than no bench. Nothing is timed here."""

import http.client
import io
import json
import os
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypedDict

import numpy as np
import pytest

from tests.rows import each_row
from tests.waiting import until, wait_until

from . import memory, results
from .__main__ import lasting_rows
from .benchmarks import BENCHMARKS, chosen
from .control_group import control_group
from .dlcmd import TREE
from .experiments.training import OBJECTS
from .inputs import D4, Shape, make, tar_stream
from .loops_program import LOOPS
from .mounts import is_mounted
from .peers import python, trees
from .peers.clusters import PROTOTYPE_PROGRAM
from .reading import (
    READER,
    compiled,
    random_order,
    read_files,
    run_loop,
    waiting_loop,
    whole_order,
    write_list,
)
from .report import Row, at_least, at_most, no_less_than, no_more_than, table
from .samples import OURS, NotMeasured, PeerMissing, Samples, alternate
from .store import BUCKET, serving
from .workbench import SessionMissing, Workbench

SMALL = Shape("small", 6, 2, 4096)
EMPTY = Shape("empty", 6, 2, 0)


def counting(*values: float) -> Callable[[], dict[str, float]]:
    """A side that measures these values, one after the other."""
    left = iter(values)
    return lambda: {"files/s": next(left)}


def test_sides_take_turns_and_the_first_place_rotates() -> None:
    ran: list[str] = []

    def side(name: str) -> Callable[[], dict[str, float]]:
        def run() -> dict[str, float]:
            ran.append(name)
            return {"s": 1.0}

        return run

    alternate(3, {name: side(name) for name in "abc"})
    assert "".join(ran) == "abcbcacab"


def test_a_ratio_is_that_of_the_medians_and_its_range_that_of_the_rounds() -> None:
    rounds = alternate(3, {OURS: counting(8, 30, 10), "tar": counting(10, 10, 20)})
    ours, other = rounds.ours("files/s"), rounds.of("tar", "files/s")
    row = Row("put", "files/s", ours, "tar", other, at_least(0.8))
    assert (row.ratio, row.ratio_range, row.met) == (1.0, (0.5, 3.0), True)
    assert ours.map(lambda rate: rate * 1e3) == Samples((8000.0, 30000.0, 10000.0))


TEN, ONE, NOTHING = (Samples((value,)) for value in (10.0, 1.0, 0.0))


@each_row(
    ("row", "met"),
    [
        (no_more_than("x", "s", Samples((9,)), 10), True),
        (no_more_than("x", "s", Samples((11,)), 10), False),
        (no_less_than("x", "s", Samples((9,)), 10), False),
        (Row("x", "s", Samples((9,)), "p", ONE, at_most(10)), True),
        (Row("x", "s", Samples((11,)), "p", ONE, at_most(10)), False),
        (no_more_than("x", "s", NOTHING, 0), True),
        (no_more_than("x", "s", ONE, 0), False),
        (no_less_than("x", "s", Samples((0.2,)), 0), True),
        (no_less_than("x", "s", NOTHING, 0), True),
        (no_less_than("x", "s", Samples((-0.2,)), 0), False),
        (Row("x", "s", ONE, "p", NOTHING, at_least(1)), None),
        (Row("x", "s", TEN), None),
    ],
)
def test_a_target_is_met_or_not(row: Row, met: bool | None) -> None:
    assert row.met is met
    if row.other == Samples((0,)):
        assert (row.ratio, row.ratio_range) == (None, None)
        assert row.against != "limit" or "= 0" in table([row])


def test_a_missing_peer_is_reported_and_the_others_are_measured() -> None:
    def missing() -> dict[str, float]:
        raise PeerMissing("not installed")

    rounds = alternate(2, {OURS: counting(1, 2), "peer": missing})
    other = rounds.of("peer", "files/s")
    row = Row("put", "files/s", rounds.ours("files/s"), "peer", other, at_least(1))
    assert isinstance(other, NotMeasured)
    assert row.met is None
    text = table([row])
    assert "not measured" in text
    assert "put: peer: not installed" in text


def test_a_side_that_breaks_is_no_missing_peer() -> None:
    def broken() -> dict[str, float]:
        raise ValueError("a fault of ours")

    with pytest.raises(ValueError, match="a fault of ours"):
        alternate(1, {OURS: broken})


def test_the_input_is_the_same_each_time_and_of_different_contents(tmp_path: Path) -> None:
    folder = make(SMALL, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.bin")}
    assert make(SMALL, tmp_path) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.bin")} == before
    contents = np.concatenate([SMALL.contents(folder) for folder in range(SMALL.folders)])
    assert len(np.unique(contents, axis=0)) == SMALL.files


def test_readers_walk_first_then_share_a_list_and_sum_its_bytes(tmp_path: Path) -> None:
    folder, program = make(SMALL, tmp_path), compiled(READER, tmp_path)
    order = whole_order(SMALL, folder, SMALL.paths(), tmp_path / "list")
    start_s = time.monotonic()
    report = read_files(program, order.list_file, readers=3, batch_files=1, walk=folder)
    assert (report.files, report.bytes, report.sum) == (order.files, order.bytes, order.sum)
    assert (order.files, order.sum) == (SMALL.files, SMALL.content_sum())
    assert report.walked == SMALL.files + SMALL.folders
    assert start_s < report.end_s < time.monotonic()
    part = random_order(SMALL, folder, 0, tmp_path, files=4)
    report = read_files(program, part.list_file)
    assert (report.files, report.bytes, report.sum) == (4, part.bytes, part.sum)
    assert part.sum != SMALL.content_sum()
    (folder / SMALL.paths()[-1]).unlink()
    with pytest.raises(subprocess.CalledProcessError):
        read_files(program, order.list_file, readers=3, batch_files=1)


def test_orders_of_folders_with_one_name_are_files_of_their_own(tmp_path: Path) -> None:
    """A copy in tmpfs has the name of its source."""
    roots = (tmp_path / "disk" / "D4", tmp_path / "tmpfs" / "D4")
    orders = [random_order(SMALL, root, 0, tmp_path) for root in roots]
    for root, order in zip(roots, orders, strict=True):
        assert os.fsencode(root) in order.list_file.read_bytes()


@each_row(("loop", "processes"), [(loop, processes) for loop in LOOPS for processes in (1, 3)])
def test_python_loops_read_all_files_on_a_signal(tmp_path: Path, loop: str, processes: int) -> None:
    folder = make(SMALL, tmp_path)
    order = whole_order(SMALL, folder, SMALL.paths(), tmp_path / "list")
    with waiting_loop(sys.executable, order, loop, processes=processes, walk=folder) as run:
        start_s = time.monotonic()
        report = run()
    assert (report.files, report.bytes) == (SMALL.files, SMALL.bytes)
    assert report.walked == SMALL.files + SMALL.folders
    assert start_s < report.end_s - report.seconds < report.end_s < time.monotonic()
    with (folder / SMALL.paths()[0]).open("ab") as file:
        file.write(b"more")
    with pytest.raises(AssertionError, match="other files or contents were read"):
        run_loop(sys.executable, order, loop, processes=processes)
    (folder / SMALL.paths()[-1]).unlink()
    with pytest.raises((AssertionError, subprocess.CalledProcessError)):
        run_loop(sys.executable, order, loop, processes=processes)


def test_another_python_is_found_in_pyenv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "versions" / "3.99.1" / "bin" / "python3.99"
    shim = tmp_path / "shims" / "python3.99"
    for program, code in ((installed, "echo 3.99"), (shim, "echo no such version >&2; exit 127")):
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\n{code}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{shim.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert python("3.99") == str(installed)
    installed.unlink()
    with pytest.raises(PeerMissing, match=r"no Python 3\.99"):
        python("3.99")


@pytest.mark.parametrize("name", [trees.SQUASHFS, trees.EROFS])
def test_the_kernel_shows_the_files_of_an_image(tmp_path: Path, name: str) -> None:
    source, mountpoint = make(SMALL, tmp_path), tmp_path / "mount"
    order = whole_order(SMALL, mountpoint, SMALL.paths(), tmp_path / "list")
    try:
        image = trees.pack(name, source, tmp_path / "image")
        with trees.mounted(name, image, mountpoint):
            report = read_files(compiled(READER, tmp_path), order.list_file, walk=mountpoint)
    except PeerMissing as error:
        pytest.skip(str(error))
    order.check(report, with_sum=True, walked=True)
    assert not is_mounted(mountpoint)


class JsonRow(TypedDict):
    """A row as `--json` writes it; of its members those that are looked at here."""

    name: str
    unit: str
    ours: float
    against: str
    other: float | None
    not_measured: list[str]


def rows_of(folder: Path, names: str, *options: str) -> list[JsonRow]:
    """Run some benchmarks with tiny inputs, and with the installed peers. Each must measure our
    side, name the missing peers, and clean up. Returns the rows."""
    file = folder / "rows.json"
    words = ["--quick", "--divisor", "100", "--keep", str(folder / "work"), "--json", str(file)]
    command = [sys.executable, "-m", "tests.bench", *words, *options, names]
    subprocess.run(command, check=False, cwd=TREE)
    rows: list[JsonRow] = json.loads(file.read_text())["rows"]
    problems = [problem for row in rows for problem in row["not_measured"]]
    assert [problem for problem in problems if ": ours: " in problem] == []
    lost = [row for row in rows if row["against"] and row["other"] is None]
    assert all(row["not_measured"] for row in lost), "a peer is missing, and no row reports it"
    assert not list((folder / "work" / "work").glob("*"))
    return rows


@pytest.mark.bench
@pytest.mark.parametrize(
    ("session", "names", "requests_an_open"),
    [
        ("kernel", "native-second", 1 if sys.version_info < (3, 14) else None),
        ("native", "native", 0),
    ],
)
def test_the_group_native_measures_every_row_of_a_session(
    tmp_path: Path, session: str, names: str, requests_an_open: int | None
) -> None:
    """The requests are known: CPython up to 3.13 makes one for each file that `open` opens, and the
    native session answers it in the kernel."""
    if session == "native" and os.geteuid():
        pytest.skip("only root can make native mounts")
    rows = rows_of(tmp_path, names, "--session", session)
    measured = {(row["name"], row["unit"]): row["ours"] for row in rows}
    loops = [name for name, unit in measured if "second epoch, open()" in name]
    assert len(loops) in (3, 6)
    if requests_an_open is not None:
        files, counted = D4.scaled(100).files, measured[f"{session} D4, second epoch", "requests"]
        more = counted - requests_an_open * len(loops) * files
        # The requests that reading the statistics makes are subtracted, which may differ by a few;
        # and the kernel may have reclaimed some pages.
        assert abs(more) < files / 4


@pytest.mark.bench
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("tasks-reads", 8),
        ("tasks-local", 2),
        pytest.param("tasks-mount", 5, marks=pytest.mark.fuse),
        pytest.param("tasks-large", 1, marks=pytest.mark.fuse),
        pytest.param("tasks-clients", 15, marks=pytest.mark.fuse),
        ("tasks-connections", 6),
        ("tasks-deaths", 10),
        ("tasks-egress", 3),
        ("tasks-cold", 2),
        ("tasks-recovery", 3),
        ("tasks-policies", 3),
        ("tasks-too-large", 1),
        ("task-plan", 4),
        pytest.param("training-waits", 20, marks=pytest.mark.fuse),
        pytest.param("training-steps", 24, marks=pytest.mark.fuse),
        pytest.param("training-tuning", 8, marks=pytest.mark.fuse),
        ("training-decoding", 2),
        ("training-api", 6),
        pytest.param("training-overhead", 3, marks=pytest.mark.fuse),
    ],
)
def test_each_benchmark_measures_every_row(tmp_path: Path, name: str, count: int) -> None:
    """Some have more rows if links can be limited, or if clients connect to all masters."""
    rows = rows_of(tmp_path, name)
    assert len(rows) >= count
    assert not [row for row in rows if row["against"] == OBJECTS and row["other"] is None]
    if name.startswith("task"):
        assert all(row["ours"] >= 0 for row in rows)
        rates = [row for row in rows if row["unit"] in ("files/s", "MB/s")]
        assert all(row["ours"] > 0 for row in rates if "after" not in row["name"])


def test_a_busy_machine_keeps_only_timed_rows_from_the_page_of_results() -> None:
    rows = {name: [Row(name, "s", Samples((1.0,)))] for name in ("put-D4L", "accuracy")}
    assert [row.name for row in lasting_rows(rows, whole=True)] == ["put-D4L", "accuracy"]
    assert [row.name for row in lasting_rows(rows, whole=False)] == ["accuracy"]


def test_the_store_answers_as_s3_does_later_and_at_its_rate(tmp_path: Path) -> None:
    delay_s, size, rate = 0.05, 1 << 20, 16 << 20
    with serving(tmp_path, delay_s=delay_s, bytes_per_s=rate) as store, ExitStack() as stack:
        content = np.random.default_rng(0).bytes(size)
        (store.bucket / "folder").mkdir()
        (store.bucket / "folder" / "object").write_bytes(content)
        connection = http.client.HTTPConnection(store.endpoint.removeprefix("http://"))
        stack.callback(connection.close)

        def ask(method: str, path: str, **headers: str) -> tuple[int, bytes]:
            connection.request(method, f"/{BUCKET}/{path}", headers=headers)
            answer = connection.getresponse()
            assert answer.headers["Content-Length"] is not None
            return answer.status, answer.read()

        start_s = time.monotonic()
        assert ask("GET", "folder/object") == (200, content)
        assert time.monotonic() - start_s > delay_s + size / rate / 2
        wait_until(lambda: store.counts().bytes == size)  # it counts the bytes that it has written
        counted = store.counts()
        assert counted.requests == 1
        assert ask("GET", "folder/object", Range="bytes=5-9") == (206, content[5:10])
        assert ask("GET", "folder/object", Range="bytes=-3") == (206, content[-3:])
        assert ask("GET", "folder/object", Range=f"bytes={size}-")[0] == 416
        assert ask("HEAD", "folder/object") == (200, b"")
        assert ask("GET", "folder/nothing")[0] == 404
        assert ask("GET", "folder/../../store")[0] == 400
        status, listed = ask("GET", "?list-type=2&prefix=folder%2F")
        assert status == 200
        assert b"<Key>folder/object</Key>" in listed
        assert ask("GET", "?list-type=2&prefix=other%2F")[1].count(b"<Key>") == 0
        assert (store.counts() - counted).requests == 8


def test_the_prototype_gives_right_files_and_its_client_finds_wrong_ones(tmp_path: Path) -> None:
    folder, sums = make(SMALL, tmp_path), tmp_path / "sums"
    paths = write_list((f"{folder}/{path}" for path in SMALL.paths()), tmp_path / "paths")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    program = [sys.executable, "-P", str(PROTOTYPE_PROGRAM)]
    environment = {**os.environ, "PYTHONPATH": str(TREE)}
    words = {"seed": 0, "seconds": 0.01, "start_s": 0.0}
    orders = [{"do": "steady_singles", **words}, {"do": "steady_batches", "size": 4, **words}]

    def read(order: dict[str, object]) -> "subprocess.CompletedProcess[str]":
        command = [*program, "read", address, str(sums), str(SMALL.file_bytes)]
        text = json.dumps(order) + "\n"
        return subprocess.run(
            command, input=text, check=False, capture_output=True, text=True, env=environment
        )

    served = [*program, "serve", address, str(sums), str(paths), "0", "1"]
    with subprocess.Popen(served, env=environment) as server:
        try:
            until(lambda: not read(orders[0]).returncode, "the prototype")
            for order in orders:
                assert json.loads(read(order).stdout)["files/s"] > 0
            sums.write_bytes(bytes(8 * SMALL.files))
            for order in orders:
                assert read(order).stderr == "wrong bytes\n"
        finally:
            server.kill()


def test_a_session_that_this_version_lacks_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SessionMissing, match="this version has no session nothing"):
        _ = Workbench(tmp_path, 1, session="nothing").session_options


def test_a_smaller_shape_has_folders_of_the_same_size() -> None:
    smaller = D4.scaled(20)
    assert (smaller.name, smaller.files, smaller.folders) == ("D4", 1000, 5)
    assert smaller.paths() == D4.paths()[:1000]


def test_the_tar_is_one_that_others_read() -> None:
    stream = io.BytesIO(b"".join(tar_stream(EMPTY)))
    with tarfile.open(fileobj=stream) as archive:
        members = archive.getmembers()
    assert [member.name for member in members if member.isfile()] == EMPTY.paths()
    assert [member.name for member in members if member.isdir()] == EMPTY.folder_names()
    assert {member.size for member in members} == {0}


def test_memory_counts_all_processes_of_a_program() -> None:
    taken = 64 << 20
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    child = f"import time; data = b'x' * {taken}; time.sleep(0.5)"
    peak = memory.peak_pss_bytes([sys.executable, "-c", code, child], {})
    assert taken < peak < 4 * taken


def test_a_control_group_counts_the_memory_of_its_processes() -> None:
    taken = 64 << 20
    with control_group() as group:
        if group is None:
            pytest.skip("no control group can be made here")
        assert group.folder.exists()
        code = f"data = b'x' * {taken}"
        subprocess.run([*group.prefix, sys.executable, "-c", code], check=True)
        assert taken < group.peak_bytes() < 4 * taken
    assert not group.folder.exists()


def test_benchmarks_are_chosen_by_how_their_names_begin() -> None:
    assert list(chosen([])) == list(BENCHMARKS)
    assert {name.partition("-")[0] for name in chosen(["put", "mount"])} == {"put", "mount"}
    with pytest.raises(KeyError):
        chosen(["putt"])


def test_a_run_replaces_its_rows_in_the_page_of_results_and_leaves_the_others() -> None:
    page = results.PAGE.read_text(encoding="utf-8")
    tar = no_less_than("put D4L", "files/s", Samples((3.0, 1.0, 2.0)), 1)
    memory = no_more_than("put D4L", "MB", Samples((3.0,)), 4)
    first = results.updated(page, [tar, memory, Row("ls", "s", Samples((4.0,)))], "Monday")
    again = Row("ls", "s", Samples((8.0,)))
    broken = Row("put D4L", "files/s", NotMeasured("no tar"), "limit", Samples((1.0,)))
    second = results.updated(first, [again, broken], "Tuesday")
    lines = [line for line in second.splitlines() if line not in page.splitlines()]
    assert lines == [
        "| put D4L | 2 | files/s | 1 | limit | 2 | (1.00-3.00) | >= 1 | yes | Monday |",
        "| put D4L | 3 | MB | 4 | limit | 0.75 |  | <= 4 | yes | Monday |",
        "| ls | 8 | s |  |  |  |  |  |  | Tuesday |",
    ]
    assert [line for line in second.splitlines() if line not in lines] == page.splitlines()
    with pytest.raises(ValueError, match="no place"):
        results.updated("# A page\n", [tar], "Monday")
