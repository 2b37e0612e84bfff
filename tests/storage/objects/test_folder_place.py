"""The folder of a store: missing, unmounted, linked, read-only, or with other files in it (FAULTS
O16, O17, B10); leftovers; large listings."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from diesel_fs.errors import (
    ConflictError,
    CorruptError,
    DieselError,
    ForeignError,
    NewerVersionError,
    ObjectExists,
    ObjectMissing,
    ObjectStoreError,
    PermissionDenied,
    UsageError,
)
from diesel_fs.format.object_names import STORE_MARKER
from diesel_fs.storage.objects.folder import FolderStore
from diesel_fs.storage.objects.store import Leftover
from tests.rows import each_row

DATASET = "datasets/" + "ab" * 16
CHUNKS = f"{DATASET}/chunks"
NAME = f"{CHUNKS}/aaaa/aaaa" + "0" * 18
OTHER = f"{CHUNKS}/aaaa/aaaa" + "1" * 18
NOBODY = 65534
OPEN_FOLDER, READ_ONLY_FOLDER = 0o755, 0o555


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    made = FolderStore.create(tmp_path / "store")
    made.put(NAME, [b"chunk"])
    return made


def test_O16_an_empty_folder_is_not_a_store(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ObjectMissing, match="mounted") as caught:
            FolderStore.open(path)
        assert caught.value.exit_code == 13
        assert os.listdir(tmp_path) == []


def test_create_opens_a_store_or_makes_one_in_an_absent_or_empty_folder(tmp_path: Path) -> None:
    absent = FolderStore.create(tmp_path / "one" / "two")
    for opened in (FolderStore.open, FolderStore.create):
        assert opened(tmp_path / "one" / "two").store_id == absent.store_id
    (tmp_path / "disk" / "lost+found").mkdir(parents=True)
    (tmp_path / "disk" / ".tmp-host-1-0123456789abcdef").touch()
    FolderStore.create(tmp_path / "disk").put(NAME, [b"x"])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(ConflictError, match="neither empty"):
        FolderStore.create(tmp_path / "mine")
    assert os.listdir(tmp_path / "mine") == ["thesis.tex"]
    with pytest.raises(ObjectStoreError, match="ENOTDIR"):
        FolderStore.create(tmp_path / "mine" / "thesis.tex")


def test_several_processes_that_create_one_store_get_the_same(tmp_path: Path) -> None:
    for turn in range(5):
        with ThreadPoolExecutor(6) as pool:
            made = [*pool.map(FolderStore.create, [tmp_path / f"store{turn}"] * 6)]
        assert len({store.store_id for store in made}) == 1


@each_row(
    ("marker", "expected"),
    [
        (b"", CorruptError),
        (b"[" * 4000, CorruptError),
        (b'{"name": "something else"}', ForeignError),
        (b"[1]", ForeignError),
        (b'{"diesel-fs": "%s", "format": 2}' % (b"0" * 32), NewerVersionError),
        (b'{"diesel-fs": "%s"}' % (b"0" * 32), CorruptError),
        (b'{"diesel-fs": "zz", "format": 1}', CorruptError),
        (b'{"diesel-fs": 7, "format": 1}', CorruptError),
    ],
)
def test_a_foreign_or_damaged_marker_is_an_error(
    store: FolderStore, marker: bytes, expected: type[DieselError]
) -> None:
    Path(store.root, STORE_MARKER).write_bytes(marker)
    for opened in (FolderStore.open, FolderStore.create):
        with pytest.raises(expected):
            opened(store.root)


def test_O16_an_unmounted_store_is_not_an_empty_store(store: FolderStore, tmp_path: Path) -> None:
    os.rename(store.root, tmp_path / "elsewhere")
    os.mkdir(store.root)  # the bare mount point
    calls: list[Callable[[], object]] = [
        lambda: store.get(NAME),
        lambda: store.stat(NAME),
        lambda: store.delete(NAME),
        lambda: store.put(OTHER, [b"x"]),
        lambda: [*store.housekeeping.names(CHUNKS)],
        lambda: [*store.list(f"{CHUNKS}/aaaa/")],
        lambda: [*store.housekeeping.leftovers("deleted/")],
    ]
    for number, call in enumerate(calls):
        with pytest.raises(ObjectStoreError, match="gone") as caught:
            call()
        assert not isinstance(caught.value, ObjectMissing), number
    assert os.listdir(store.root) == [], "the mount point was written into"
    os.rmdir(store.root)
    os.rename(tmp_path / "elsewhere", store.root)
    store.put(OTHER, [b"x"])
    assert store.get(NAME) == b"chunk"


def test_O16_another_store_in_the_same_place_is_noticed(store: FolderStore) -> None:
    shutil.rmtree(store.root)
    FolderStore.create(store.root)
    for call in (lambda: store.put(OTHER, [b"x"]), lambda: store.get(NAME)):
        with pytest.raises(ObjectStoreError, match="another store"):
            call()


def test_O17_any_spelling_opens_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tmp_path / "a store of mine"
    (tmp_path / "link").symlink_to("a store of mine")
    monkeypatch.chdir(tmp_path)
    made = FolderStore.create("link/")
    spelled = ["a store of mine", "./link", f"{tmp_path}//link/", "link/../link", str(real)]
    stores = [FolderStore.open(path) for path in spelled]
    monkeypatch.chdir("/")
    (tmp_path / "link").unlink()
    for number, store in enumerate(stores):
        assert store.root == made.root == str(real)
        name = NAME[:-1] + str(number)
        store.put(name, [b"x"])
        assert made.get(name) == b"x"
    with pytest.raises(UsageError):
        FolderStore.open("")


def test_a_folder_that_was_moved_and_linked_is_read(store: FolderStore, tmp_path: Path) -> None:
    os.rename(f"{store.root}/datasets", tmp_path / "larger disk")
    os.symlink(tmp_path / "larger disk", f"{store.root}/datasets")
    store.put(OTHER, [b"x"])
    assert [*store.housekeeping.names(CHUNKS)] == [NAME, OTHER]
    assert store.get(NAME) == b"chunk"
    store.delete(NAME)
    assert [*store.housekeeping.names("")] == [STORE_MARKER, OTHER]


@contextmanager
def another_user() -> Iterator[None]:
    """If this process is root, become another user, to whom permissions apply."""
    if os.geteuid() != 0:
        yield
        return
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.fixture
def public() -> Iterator[FolderStore]:
    with tempfile.TemporaryDirectory() as above, ExitStack() as undo:
        os.chmod(above, OPEN_FOLDER)
        made = FolderStore.create(f"{above}/store")
        made.put(NAME, [b"chunk"])
        for folder, _, _ in os.walk(above):
            undo.callback(os.chmod, folder, OPEN_FOLDER)
            os.chmod(folder, READ_ONLY_FOLDER)
        yield made


def test_O16_a_read_only_folder_of_another_user_is_read(public: FolderStore) -> None:
    with another_user():
        store = FolderStore.open(public.root)
        assert FolderStore.create(public.root).store_id == store.store_id
        assert store.get(NAME) == b"chunk"
        assert [info.bytes for info in store.list(CHUNKS)] == [5]
        changes: list[Callable[[], object]] = [
            lambda: store.put(OTHER, [b"x"]),
            lambda: store.put("deleted/" + "0" * 32, [b"x"]),
            lambda: store.delete(NAME),
            lambda: FolderStore.create(f"{public.root}/../new"),
        ]
        for change in changes:
            with pytest.raises(PermissionDenied):
                change()
    assert public.get(NAME) == b"chunk"


def test_a_listing_never_skips_a_folder_that_it_may_not_read(public: FolderStore) -> None:
    os.chmod(f"{public.root}/{CHUNKS}", 0o700 if os.geteuid() == 0 else 0)
    with another_user():
        store = FolderStore.open(public.root)
        for prefix in ("", CHUNKS, f"{CHUNKS}/", f"{CHUNKS}/aaaa/"):
            with pytest.raises(PermissionDenied):
                [*store.housekeeping.names(prefix)]
        with pytest.raises(PermissionDenied):
            store.get(NAME)
    os.chmod(f"{public.root}/{CHUNKS}", READ_ONLY_FOLDER)


def test_objects_get_the_modes_of_the_umask(store: FolderStore) -> None:
    before = os.umask(0o027)
    try:
        store.put(f"datasets/{'0' * 32}/DATASET", [b"x"])
    finally:
        os.umask(before)
    assert os.stat(f"{store.root}/datasets/{'0' * 32}").st_mode & 0o777 == 0o750
    assert os.stat(f"{store.root}/datasets/{'0' * 32}/DATASET").st_mode & 0o777 == 0o640


def test_B10_garbage_is_ignored_named_and_kept(store: FolderStore) -> None:
    root = Path(store.root)
    before = [*store.list("")]
    files = ["README", ".DS_Store", "datasets/README", f"{CHUNKS}/.DS_Store", f"{CHUNKS}/aaaa/x y"]
    files += [f"{CHUNKS}/aaaa/aaab" + "0" * 18, f"{CHUNKS}/aaaa/.tmp-mine", "datasets/\udcff\n"]
    for name in files:
        (root / name).write_bytes(b"garbage")
    folders = ["x", f"{CHUNKS}/aaaa/y", OTHER, ".git/objects", f"{CHUNKS}/.snapshot/{NAME}"]
    for name in folders:
        (root / name).mkdir(parents=True)
    link, pipe = f"{CHUNKS}/aaaa/aaaa" + "2" * 18, f"{CHUNKS}/aaaa/aaaa" + "3" * 18
    (root / link).symlink_to(root / NAME)
    os.mkfifo(root / pipe)
    for name in ("meta.sqlite", "meta.sqlite-wal", "meta.sqlite-shm", "meta.lease", "lost+found/x"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).touch()
    assert [*store.list("")] == before
    named = {*files, link, pipe}
    named |= {"x/", f"{CHUNKS}/aaaa/y/", f"{OTHER}/", ".git/", f"{CHUNKS}/.snapshot/"}
    assert sorted(store.housekeeping.foreign()) == sorted(named)
    assert [*store.housekeeping.leftovers()] == []
    for name in (OTHER, link, pipe):
        for call in (store.get, store.stat, store.delete):
            with pytest.raises(ObjectStoreError) as caught:
                call(name)
            assert not isinstance(caught.value, ObjectMissing)
        with pytest.raises(ObjectExists):
            store.put(name, [b"x"])
    assert sorted(store.housekeeping.foreign()) == sorted(named)
    assert store.get(NAME) == b"chunk"


def test_leftovers_name_their_writer_and_are_discarded_one_by_one(store: FolderStore) -> None:
    here = f"{CHUNKS}/aaaa/.tmp-gpu-node-7.example-4711-0123456789abcdef"
    Path(store.root, here).write_bytes(b"half")
    os.utime(Path(store.root, here), ns=(0, 5_000_000_000))
    Path(store.root, ".tmp-x-1-0123456789abcdef").touch()
    found = {leftover.name: leftover for leftover in store.housekeeping.leftovers()}
    assert len(found) == 2
    assert found[here] == Leftover(here, 4, 5_000_000_000, "gpu-node-7.example", 4711)
    assert [leftover.name for leftover in store.housekeeping.leftovers(CHUNKS)] == [here]
    assert [*store.housekeeping.names(CHUNKS)] == [NAME]
    store.housekeeping.discard(found[here])
    store.housekeeping.discard(found[here])
    assert len([*store.housekeeping.leftovers()]) == 1
    for name in (NAME, "../.tmp-x-1-0123456789abcdef", f"x/{here}", "meta.sqlite"):
        with pytest.raises(UsageError):
            store.housekeeping.discard(Leftover(name, 0, 0, "x", 1))


def fill(root: str, folders: int, each: int) -> list[str]:
    """Make chunks by plain system calls, unordered. Returns their names in order."""
    names = []
    for folder in range(folders):
        shard = f"{folder:04x}"
        os.makedirs(f"{root}/{CHUNKS}/{shard}")
        for number in reversed(range(each)):
            names.append(f"{CHUNKS}/{shard}/{shard}{number:018d}")
            os.close(os.open(f"{root}/{names[-1]}", os.O_CREAT | os.O_WRONLY))
    return sorted(names)


def test_long_listings_are_sorted_and_lazy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore.create(tmp_path / "store")
    names = fill(store.root, 200, 100)
    scandir, scanned = os.scandir, []

    def count(path: str) -> object:
        scanned.append(path)
        return scandir(path)

    def refuse(path: str) -> None:
        raise AssertionError("names need no stat")

    began = time.perf_counter()
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", count)
        patch.setattr(os, "lstat", refuse)
        assert [*store.housekeeping.names(f"{CHUNKS}/")] == names
        assert len(scanned) == 201
        scanned.clear()
        assert next(store.housekeeping.names(f"{CHUNKS}/", after=names[15_000])) == names[15_001]
        assert len(scanned) <= 3, "folders before `after`, or after the answer, were read"
    assert [info.name for info in store.list(CHUNKS, after=names[9_999])] == names[10_000:]
    assert time.perf_counter() - began < 5
