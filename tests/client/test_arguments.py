"""Tests of bad arguments: each call of the Python API names the argument and the reason."""

import ast
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import diesel_fs
from diesel_fs import errors
from diesel_fs.arguments import in_keywords
from diesel_fs.client.dataset import Dataset, connect, list_datasets
from diesel_fs.errors import (
    ConflictError,
    DieselError,
    IsAFolder,
    NoSuchDataset,
    NoSuchFile,
    NoSuchPath,
    NotAFolder,
    ObjectMissing,
    UsageError,
)
from tests.rows import each_row

LIBRARY = Path(diesel_fs.__file__).parent

NOT_TEXT = [b"pets", b"", 3, 1.5, True, [], {}, object(), Path("pets"), np.zeros((2, 2)), int]
NO_NUMBER = ["3", b"3", 1.5, float("nan"), True, [], object(), np.zeros(2), 1j]
NO_FLAG = ["yes", "", b"", 1, 0, 1.5, [], object(), np.zeros(2)]
NO_ENTRY = [None, 1.5, True, [], {}, object(), bytearray(b"a"), io.BytesIO(b"a"), np.zeros((2, 2))]
NO_LIST = [
    *(None, 3, 1.5, True, object(), {}, int),
    *(bytearray(b"a"), memoryview(b"a"), io.BytesIO(b"a")),
]
NO_FILE = [None, b"x", 3, 1.5, [], object(), "", "a\0b", "\ud800"]
NO_PATH = [
    *(None, 3, 1.5, [], object()),
    *("a\0b", "\ud800", "n" * 256, "/a", "a//b", "a/", ".", "a/../b"),
]
NO_SOURCE = [None, 3, 1.5, [], {}, object(), np.zeros(2), iter(["a"]), io.StringIO("text"), "a\0b"]
NO_INDICES = [None, "ab", b"ab", 3, 1.5, [[1], [2, 3]], ["a"], [1.5], object(), np.zeros((2, 2))]

GOOD: dict[str, dict[str, object]] = {
    "get": {"path": "a.txt"},
    "open": {"path": "a.txt"},
    "read_many": {"paths": ["a.txt"]},
    "shuffle": {"seed": 1, "epoch": 0},
    "follow": {"order": np.array([1]), "ends": np.array([1])},
    "stat": {"path": "a.txt"},
    "stat_many": {"paths": ["a.txt"]},
    "ls": {},
    "put": {"source": b"x", "path": "new"},
    "delete": {"path": "a.txt"},
    "save_meta": {},
    "load_meta": {},
    "purge": {},
}
BAD: list[tuple[str, str, list[object]]] = [
    *((call, "path", NO_ENTRY) for call in ("get", "open", "stat", "ls", "delete")),
    *((call, "paths", NO_LIST) for call in ("read_many", "stat_many")),
    *(("shuffle", name, [*NO_NUMBER, None, -1, 1 << 63]) for name in ("seed", "epoch")),
    *(("shuffle", name, [*NO_NUMBER, None, -1, 0]) for name in ("group_size", "world")),
    ("shuffle", "rank", [*NO_NUMBER, None, -1, 1]),
    ("shuffle", "drop_last", [*NO_FLAG, None]),
    ("shuffle", "below", [*NO_ENTRY, "a.txt"]),
    ("follow", "order", [*NO_INDICES, [0], [1, 1]]),
    ("follow", "ends", [*NO_INDICES, [], [0], [2], [1, 0]]),
    ("put", "source", NO_SOURCE),
    ("put", "path", [*NO_PATH, "", ".diesel"]),
    ("put", "mode", [*NO_NUMBER, None, -1, 1 << 16]),
    ("put", "mtime_ns", [*NO_NUMBER, 1 << 63, -(1 << 63) - 1]),
    ("delete", "recursive", [*NO_FLAG, None]),
    *((call, "file", NO_FILE) for call in ("save_meta", "load_meta")),
    ("purge", "max_unused", ["0", None, True, [], object(), float("nan"), -0.1, 2]),
    *(("purge", name, [*NO_NUMBER, None, -2, 1 << 80]) for name in ("keep", "grace_s")),
    ("purge", "dry_run", [*NO_FLAG, None]),
]
"""For each argument of each call of a dataset: values that it refuses."""

CONNECT: list[tuple[str, list[object]]] = [
    ("dataset", [*NOT_TEXT, None, "", "../pets", "n" * 64, "pets@"]),
    *((name, NOT_TEXT) for name in ("url", "user", "key", "task", "task_key", "listen")),
    *((name, NO_FLAG) for name in ("create", "peer_tls", "peers_through_master")),
    *((name, [*NO_NUMBER, -1]) for name in ("memory_bytes", "task_memory_bytes", "cache_bytes")),
    *((name, [b"3", 1.5, True, [], "x", -1]) for name in ("rank", "world")),
    *((name, [*NOT_TEXT, "other"]) for name in ("compress", "policy", "evict", "cache_layout")),
    ("cool_down_s", [*NO_NUMBER, -1]),
    *((name, [*NO_NUMBER[:2], *NO_NUMBER[3:], -1]) for name in ("lrfu_p", "lrfu_step")),
    ("cache_dir", [b"x", 3, 1.5, [], object()]),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = (tmp_path_factory.mktemp("arguments") / "store").as_uri()
    with connect("pets", found, create=True) as dataset:
        dataset.put(b"content", "a.txt")
        dataset.put(b"", "train/x")
    return found


@pytest.fixture
def dataset(url: str) -> Iterator[Dataset]:
    with connect("pets", url) as opened:
        yield opened


def refusal(call: object, **arguments: object) -> str:
    assert callable(call)
    with pytest.raises(UsageError) as error:
        call(**arguments)
    complaint = str(error.value)
    assert len(complaint) < 1000
    assert "object at 0x" not in complaint
    return complaint


def test_D1_bad_arguments_of_a_dataset_change_nothing(dataset: Dataset, tmp_path: Path) -> None:
    version, parameters = dataset.version, {"file": tmp_path / "saved"}
    for call, argument, values in BAD:
        for value in values:
            good = GOOD[call] | (parameters if "meta" in call else {})
            try:
                refusal(getattr(dataset, call), **{**good, argument: value})
            except BaseException as error:
                error.add_note(f"{call}({argument}={value!r:.80})")
                raise
    assert dataset.flush() == version, "no folder of a file that was refused is put"
    assert sorted(dataset.ls()) == ["a.txt", "train"]


def test_D1_every_bad_argument_of_connect_is_refused(url: str) -> None:
    for argument, values in CONNECT:
        for value in values:
            try:
                refusal(connect, **{"dataset": "pets", "url": url, argument: value})
                if argument in ("url", "user", "key"):
                    refusal(list_datasets, **{"url": url, argument: value})
            except BaseException as error:
                error.add_note(f"connect({argument}={value!r:.80})")
                raise


def test_D1_every_bad_argument_of_a_mount_is_refused(url: str, tmp_path: Path) -> None:
    good = {"dataset": "pets", "folder": tmp_path / "at", "url": url}
    for argument, values in {
        "dataset": [*NOT_TEXT, None], "folder": NO_FILE, "url": NOT_TEXT, "allow_other": NO_FLAG,
        "memory_bytes": [*NO_NUMBER, -1], "metrics": NOT_TEXT,
    }.items():  # fmt: skip
        for value in values:
            refusal(diesel_fs.mount, **{**good, argument: value})
    for value in NO_FILE:
        refusal(diesel_fs.umount, directory=value)
        refusal(diesel_fs.filelist, directory=value)
    for value in NO_FLAG:
        refusal(diesel_fs.umount, directory=tmp_path, lazy=value)
        refusal(diesel_fs.umount, directory=tmp_path, force=value)
    assert not (tmp_path / "at").exists()


@each_row(
    ("arguments", "complaint"),
    [
        ({"memory": 5}, "is memory_bytes meant"),
        ({"urll": "x"}, "is url meant"),
        ({"compres": "lz4"}, "is compress meant"),
        ({"cache_size": 5}, "is cache_bytes meant"),
        ({"quite_another": 5}, "known: dataset, url, user, key, create"),
    ],
)
def test_an_unknown_word_is_answered_with_one_that_the_call_takes(
    url: str, arguments: dict[str, object], complaint: str
) -> None:
    assert complaint in refusal(connect, **{"dataset": "pets", "url": url, **arguments})


@each_row(
    ("call", "kind", "system", "complaint"),
    [
        (
            lambda ds: ds.get("/train/x"),
            UsageError,
            ValueError,
            "from the dataset's root on: train/x",
        ),
        (lambda ds: ds.get("./train//x/"), UsageError, ValueError, "on: train/x"),
        (
            lambda ds: ds.get("train"),
            IsAFolder,
            IsADirectoryError,
            "'train' is not a file: it is a",
        ),
        (lambda ds: ds.open("train"), IsAFolder, IsADirectoryError, "it is a folder"),
        (lambda ds: [*ds.read_many(["train"])], DieselError, DieselError, "train"),
        (lambda ds: ds.get("a.txt/x"), NotAFolder, NotADirectoryError, "'a.txt' is a file"),
        (lambda ds: ds.stat("a.txt/x/y"), NoSuchPath, NotADirectoryError, "'a.txt' is a file"),
        (lambda ds: ds.read_many(["a.txt/x"]), NotAFolder, FileNotFoundError, "'a.txt' is a file"),
        (lambda ds: ds.get("train/none"), NoSuchPath, FileNotFoundError, "train/none"),
        (lambda ds: ds.put("hello", "b.txt"), NoSuchFile, FileNotFoundError, "text.encode()"),
        (lambda ds: ds.put("a/b", b"x"), NoSuchFile, FileNotFoundError, "`path` comes second"),
        (lambda ds: ds.put("/etc", "b"), ConflictError, ConflictError, "'b' is not put"),
        (lambda ds: ds.put("n" * 300, "b"), DieselError, DieselError, "File name too long"),
        (lambda ds: ds.load_meta("/nowhere"), NoSuchFile, FileNotFoundError, "no file /nowhere"),
    ],
)
def test_an_error_has_the_kind_that_files_have_and_names_the_cure(
    dataset: Dataset,
    call: Callable[[Dataset], object],
    kind: type[Exception],
    system: type[Exception],
    complaint: str,
) -> None:
    with pytest.raises(kind) as error:
        call(dataset)
    assert complaint in str(error.value)
    if issubclass(system, OSError):
        assert isinstance(error.value, system)
        assert isinstance(error.value, DieselError)
        assert os.strerror(error.value.errno) == error.value.strerror


def test_a_missing_dataset_or_repository_names_create_as_the_cure(url: str, tmp_path: Path) -> None:
    nowhere = (tmp_path / "none").as_uri()
    with pytest.raises(ObjectMissing, match=r"create=True\) makes a new repository and dataset"):
        connect("pets", nowhere)
    with pytest.raises(NoSuchDataset, match=r"create=True\) makes a new dataset"):
        connect("other", url)
    with pytest.raises(ObjectMissing) as error:
        list_datasets(nowhere)
    assert "create" not in str(error.value)


def test_memory_of_any_shape_is_put_whole(dataset: Dataset) -> None:
    numbers = np.arange(4, dtype=np.int64)
    dataset.put(numbers.data, "numbers")
    dataset.put(memoryview(b"abcdef")[::2], "every second")
    dataset.put(bytearray(b"xyz"), "array", mode=0o100600)
    dataset.flush()
    assert dataset.get("numbers") == numbers.tobytes()
    assert dataset.get("every second") == b"ace"
    assert dataset.stat("array")[1:3] == (0o600, 3)
    for path in ("numbers", "every second", "array"):
        dataset.delete(path)


def test_D1_metadata_by_index_take_whole_numbers_only(dataset: Dataset) -> None:
    view = dataset.snapshot
    for call in (view.path, view.name, view.stat, view.size, view.children, view.parent):
        for bad in (None, "a.txt", 1.5, [1], object()):
            with pytest.raises(TypeError, match="integer"):
                call(bad)  # type: ignore[arg-type]  # on purpose
        for outside in (-1, len(view), 1 << 80):
            with pytest.raises(IndexError, match="no entry"):
                call(outside)


def test_a_closed_stream_is_not_read(dataset: Dataset) -> None:
    stream = dataset.open("a.txt")
    for bad in (stream.seek, stream.read):
        with pytest.raises(TypeError):
            bad(1.5)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ValueError, match="from -1 on"):
        stream.read_at(-1, 1)
    stream.close()
    for call in (stream.read, stream.readall, lambda: stream.read_at(0, 1), lambda: stream.seek(0)):
        with pytest.raises(ValueError, match="closed"):
            call()


@each_row(
    ("message", "expected"),
    [
        ("name a user by --user and --key-file", "name a user by `user` and `key`"),
        ("say --listen ADDRESS:0", 'say `listen="ADDRESS:0"`'),
        ("say --rank, too", "say `rank`, too"),
        ("only root may use --allow-other here", "only root may use `allow_other=True` here"),
        (
            "by --peers host:port,..., with a --task-key-file",
            "by `peers` host:port,..., with a `task_key`",
        ),
        ("run `dlcmd mount --task x --rank 0`", "run `dlcmd mount --task x --rank 0`"),
        ("use --peers-through-master", "use `peers_through_master=True`"),
        ("start it with --device /dev/fuse", "start it with --device /dev/fuse"),
    ],
)
def test_messages_name_keyword_arguments(message: str, expected: str) -> None:
    assert in_keywords(message) == expected


def test_an_error_of_connect_names_keyword_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DIESEL_USER", "DIESEL_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="by `user` and `key`"):
        connect("pets", "diesel://127.0.0.1:1")
    with pytest.raises(UsageError, match="give it by `key` or DIESEL_KEY"):
        list_datasets("diesel://127.0.0.1:1", "ann")


_ONLY_DLCMD = ("ingest", "forecast", "mounts/options.py", "diesel_hook")
"""Modules that only `dlcmd` uses: their errors may name options that Python calls lack."""

_KINDS = {name for name, value in vars(errors).items() if isinstance(value, type)}


def test_every_message_of_the_library_has_a_form_for_python() -> None:
    """An option that a message names is a keyword argument, or part of a command of `dlcmd`."""
    left = []
    for path in LIBRARY.rglob("*.py"):
        if any(part in str(path.relative_to(LIBRARY)) for part in _ONLY_DLCMD):
            continue
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in _KINDS:
                texts = [
                    each.value
                    for value in [*call.args, *(word.value for word in call.keywords)]
                    for each in ast.walk(value)
                    if isinstance(each, ast.Constant) and isinstance(each.value, str)
                ]
                complaint = in_keywords(" ".join(texts))
                outside = "".join(complaint.split("`")[::2])
                commands = ("dlcmd ", "--device", "lazy=True")
                if "--" in outside and not any(each in outside for each in commands):
                    left.append(f"{path.name}:{call.lineno}: {complaint}")
    assert not left, "\n".join(left)
