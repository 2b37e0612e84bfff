"""Tests of how a program names entries (by paths or indices) and versions (by number)."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
import torch

import diesel_fs
from diesel_fs.client.addressing import EntryKey, EntryKeys
from diesel_fs.client.dataset import Dataset, connect
from diesel_fs.errors import ConflictError, NoSuchPath, NotFoundError, UsageError
from diesel_fs.format.entries import Kind
from diesel_fs.urls import parse_url
from tests.rows import each_row

CONTENTS = {f"d{i % 3}/f{i:02}": b"content %d" % i * (i + 1) for i in range(30)}


@pytest.fixture
def url(tmp_path: Path) -> str:
    found = (tmp_path / "store").as_uri()
    with connect("ds", found, create=True) as dataset:
        for path, content in CONTENTS.items():
            dataset.put(content, path)
    return found


def index_of(dataset: Dataset, path: str) -> int:
    return dataset.snapshot.lookup(path.encode())


KEY_FORMS: dict[str, Callable[[Dataset, str], EntryKey]] = {
    "text": lambda _, path: path,
    "bytes": lambda _, path: path.encode(),
    "a path object": lambda _, path: PurePosixPath(path),
    "int": index_of,
    "numpy": lambda dataset, path: np.int64(index_of(dataset, path)),
    "unsigned numpy": lambda dataset, path: np.uint32(index_of(dataset, path)),
    "torch": lambda dataset, path: torch.tensor(index_of(dataset, path)),
}


@pytest.fixture
def dataset(url: str) -> Iterator[Dataset]:
    with connect("ds", url) as opened:
        yield opened


@pytest.mark.parametrize("way", KEY_FORMS)
def test_one_entry_is_named_in_any_way(dataset: Dataset, way: str) -> None:
    file, folder = KEY_FORMS[way](dataset, "d1/f01"), KEY_FORMS[way](dataset, "d1")
    inside = [path for path in CONTENTS if path.startswith("d1/")]
    assert dataset.get(file) == CONTENTS["d1/f01"]
    assert dataset.stat(file) == dataset.snapshot.stat(index_of(dataset, "d1/f01"))
    assert dataset.stat(folder).kind == Kind.FOLDER
    assert dataset.ls(folder) == [path[3:] for path in inside]
    assert dataset.ls(file) == ["f01"]
    order = dataset.shuffle(seed=1, epoch=0, below=folder)
    assert sorted(dataset.snapshot.paths(order)) == [path.encode() for path in inside]
    with pytest.raises(ConflictError):
        dataset.delete(folder)
    dataset.delete(file)
    with pytest.raises(NoSuchPath):
        dataset.get("d1/f01")
    assert len(dataset) == len(CONTENTS) - 1


def test_an_index_to_delete_belongs_to_the_version_that_was_shown(dataset: Dataset) -> None:
    """`delete` flushes first, which makes another version with other indices."""
    dataset.put(b"first of all", "a")
    dataset.delete(index_of(dataset, "d0/f03"))
    assert "f03" not in dataset.ls("d0")
    assert len(dataset) == len(CONTENTS)


def test_many_entries_are_named_in_any_way(dataset: Dataset) -> None:
    paths = ["d2/f29", "d0/f00", "d0/f00", "d1/f13"]
    indices = [index_of(dataset, path) for path in paths]
    ways: dict[str, Callable[[], object]] = {
        "list": lambda: paths,
        "tuple": lambda: tuple(path.encode() for path in paths),
        "iterator": lambda: iter(paths),
        "array of text": lambda: np.array(paths),
        "array of bytes": lambda: np.array(paths, "S"),
        "path objects": lambda: [Path(path) for path in paths],
        "indices": lambda: indices,
        "indices as an iterator": lambda: iter(indices),
        "int64": lambda: np.array(indices),
        "uint16": lambda: np.array(indices, np.uint16),
        "tensor": lambda: torch.tensor(indices),
        "tensors": lambda: list(torch.tensor(indices)),
    }
    for name, many in ways.items():
        views = dataset.read_many(many())  # type: ignore[arg-type]  # any of them
        assert [bytes(view) for view in views] == [CONTENTS[path] for path in paths], name
        sizes = dataset.stat_many(many()).size.tolist()  # type: ignore[arg-type]  # as above
        assert sizes == [len(CONTENTS[path]) for path in paths], name
    empty_lists: list[EntryKeys] = [[], (), np.array([], np.int64), set[int]()]
    for empty in empty_lists:
        assert list(dataset.read_many(empty)) == []
        assert len(dataset.stat_many(empty)) == 0


@each_row("missing", ["nowhere", b"d1/x", 10**6, -1, 2**70, np.int64(34)])
def test_calls_raise_one_error_for_a_missing_entry(dataset: Dataset, missing: EntryKey) -> None:
    for call in (dataset.get, dataset.stat, dataset.ls, dataset.delete):
        with pytest.raises(NoSuchPath):
            call(missing)
    with pytest.raises(NoSuchPath):
        dataset.shuffle(seed=1, epoch=0, below=missing)
    if missing == 2**70:
        return  # too large for an array of integers
    for many in (dataset.read_many, dataset.stat_many):
        with pytest.raises(FileNotFoundError, match=r"nowhere|d1/x|index"):
            many([missing])  # type: ignore[arg-type]  # a path or an index


@each_row("bad", ["/d1/f01", "d1//f01", "d1/", "./d1", "\ud8ff", 1.5, None, [1]])
def test_every_call_refuses_a_bad_path_or_index(dataset: Dataset, bad: EntryKey) -> None:
    for call in (dataset.get, dataset.stat, dataset.ls, dataset.delete):
        with pytest.raises(UsageError):
            call(bad)
    for many in (dataset.read_many, dataset.stat_many):
        with pytest.raises(UsageError):
            many([bad])  # type: ignore[arg-type]  # it is bad


@each_row(
    "mixed", [["d1/f01", 3], [3, "d1/f01"], "d1/f01", b"d1/f01", np.zeros((2, 2), int), [True]]
)
def test_paths_and_indices_cannot_be_mixed(dataset: Dataset, mixed: list[int]) -> None:
    """Bytes could be read as many indices."""
    for many in (dataset.read_many, dataset.stat_many):
        with pytest.raises(UsageError):
            many(mixed)


# versions -----------------------------------------------------------------------------------------


@pytest.fixture
def before(url: str) -> int:
    with connect("ds", url) as dataset:
        version = dataset.version
        dataset.put(b"changed", "d0/f00")
        dataset.delete("d0/f03")
    return version


def test_a_version_is_opened_by_its_number(url: str, before: int) -> None:
    with connect(f"ds@{before}", url) as dataset:
        assert (dataset.name, dataset.version) == ("ds", before)
        assert dataset.get("d0/f00") == CONTENTS["d0/f00"]
        assert dataset.get("d0/f03") == CONTENTS["d0/f03"]
        with connect("ds", url) as writer:
            writer.put(b"later", "later")
            writer.flush()
            with pytest.raises(NoSuchPath):
                dataset.get("later")  # a named version does not move on by itself
        with copy.deepcopy(dataset) as other:
            assert other.version == before
            with pytest.raises(UsageError):
                other.put(b"", "x")
        assert dataset.refresh() > before
        assert dataset.get("later") == b"later"
        dataset.put(b"last", "last")
    with connect("ds", url) as dataset:
        assert dataset.get("last") == b"last"


def test_a_kept_version_is_read_only(url: str, before: int) -> None:
    with connect(f"ds@{before}", url) as dataset:
        for write in (
            lambda: dataset.put(b"", "x"),
            lambda: dataset.delete("d0/f03"),
            dataset.purge,
            dataset.delete_dataset,
        ):
            with pytest.raises(UsageError, match=r"is a kept version.*refresh"):
                write()
        assert dataset.flush() == before
    with connect("ds", url) as dataset:
        assert dataset.get("d0/f00") == b"changed"


@each_row(
    ("text", "error"),
    [
        ("ds@", UsageError),
        ("ds@newest", UsageError),
        ("ds@0", UsageError),
        ("@1", UsageError),
        ("ds@5", NotFoundError),
        ("other@5", NotFoundError),
    ],
)
def test_a_bad_version_is_refused(url: str, text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        connect(text, url)
    with pytest.raises(UsageError):
        connect(text, url, create=True)


@pytest.mark.fuse
def test_a_version_is_mounted_by_its_number(url: str, before: int, tmp_path: Path) -> None:
    point = tmp_path / "point"
    point.mkdir()
    with diesel_fs.mount(f"ds@{before}", point, url=url) as mounted:
        assert (Path(mounted) / "d0/f03").read_bytes() == CONTENTS["d0/f03"]
    with connect(f"ds@{before}", url) as dataset:
        with diesel_fs.mount(dataset, point):
            assert (point / "d0/f03").read_bytes() == CONTENTS["d0/f03"]
        dataset.refresh()
        with diesel_fs.mount(dataset, point):
            assert not (point / "d0/f03").exists()
    with pytest.raises(NotFoundError, match="is not kept"):
        diesel_fs.mount("ds@5", point, url=url)
    with pytest.raises(UsageError):
        diesel_fs.mount("ds@x", point, url=url)


# life ---------------------------------------------------------------------------------------------


def test_every_call_on_a_closed_dataset_is_refused(url: str, tmp_path: Path) -> None:
    dataset = connect("ds", url)
    saved = tmp_path / "saved"
    dataset.save_meta(saved)
    dataset.close()
    dataset.close()
    for call in (
        lambda: dataset.get("d0/f00"),
        lambda: dataset.get(3),
        lambda: dataset.read_many(["d0/f00"]),
        lambda: dataset.stat("d0/f00"),
        lambda: dataset.stat_many([3]),
        dataset.ls,
        dataset.refresh,
        dataset.flush,
        dataset.purge,
        dataset.delete_dataset,
        lambda: dataset.shuffle(seed=1, epoch=0),
        lambda: dataset.put(b"", "x"),
        lambda: dataset.delete("d0/f00"),
        lambda: dataset.save_meta(tmp_path / "other"),
        lambda: dataset.load_meta(saved),
        lambda: copy.deepcopy(dataset),
    ):
        with pytest.raises(UsageError, match=r"'ds' is closed; connect to it again"):
            call()
    assert connect("ds", url).get("d0/f00") == CONTENTS["d0/f00"]


def test_S8_repr_shows_version_and_address_but_no_secret(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    with connect("ds", url, create=True) as dataset:
        dataset.put(b"1", "a")
        dataset.flush()
        assert repr(dataset) == f"<Dataset ds@{dataset.version} of {url}, files: 1>"
        dataset._repository.url = parse_url(f"{url}?meta=redis://me:canary@127.0.0.1:1")
        assert "redis://***@127.0.0.1:1" in repr(dataset)
        assert "canary" not in repr(dataset)
    assert repr(dataset).endswith(", files: 1, closed>")
