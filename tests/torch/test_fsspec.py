"""Tests of `diesel://`: fsspec's own suite, and versions, links and errors as users see them."""

import errno
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partialmethod
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from unittest.mock import Mock

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.tests.abstract import AbstractFixtures, AbstractGetTests
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.client.dataset import connect, list_datasets
from diesel_fs.errors import CorruptError, ObjectStoreError, UsageError
from diesel_fs.ingest import FolderSource, PutOptions, put
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.objects.folder import FolderReads, FolderStore
from diesel_fs.torch.fsspec import DieselFileSystem
from tests.examples import examples
from tests.rows import each_row
from tests.server.certificates import Authority
from tests.server.program import Server, new_repository
from tests.trees import write

LARGE = bytes(range(256)) * 40_000  # 10 MB: several extents
FILES = {
    "train/cat/1.jpg": b"cat one",
    "train/cat/2.jpg": b"cat two",
    "train/dog/1.jpg": b"dog",
    "empty": b"",
    "large": LARGE,
    "lines": b"one\ntwo\r\n\nlast",
}


def put_folder(url: str, source: Path, dataset: str = "pets") -> None:
    with LocalRepository.open(url, create=True) as repository:
        put(repository, dataset, FolderSource(source), options=PutOptions(chunk_bytes=1 << 20))


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    yield
    for kind in ("diesel", "diesel+tls"):
        found = fsspec.get_filesystem_class(kind)
        for fs in [*found._cache.values()]:
            fs.close()
        found.clear_instance_cache()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = write(tmp_path / "src", FILES)
    (folder / "to_file").symlink_to("train/cat/1.jpg")
    (folder / "train/to_folder").symlink_to("../train/cat")
    (folder / "train/circle").symlink_to("..")
    (folder / "itself").symlink_to("itself")
    (folder / "broken").symlink_to("nowhere")
    (folder / "outside").symlink_to("/etc/hostname")
    (folder / "above").symlink_to("../../etc")
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe.txt")).write_bytes(b"not UTF-8")
    return folder


@pytest.fixture
def url(tmp_path: Path, source: Path) -> str:
    found = (tmp_path / "store").as_uri()
    put_folder(found, source)
    return found


@pytest.fixture
def fs(url: str) -> DieselFileSystem:
    return fsspec.filesystem("diesel", repository=url)  # type: ignore[no-any-return]  # untyped


Join = Callable[[str, str], str]
Scenario = Callable[[LocalFileSystem, Join, str], object]
Packed = Callable[[Scenario], str]


class Writable(DieselFileSystem):
    """Adds the two calls with which one test of fsspec's suite makes a file of its own."""

    def mkdir(self, path: str) -> None:  # type: ignore[override]  # ours refuses
        pass

    def touch(self, path: str) -> None:  # type: ignore[override]  # ours refuses
        with connect("pets", self.storage_options["repository"], create=True) as dataset:
            dataset.put(b"", path.removeprefix("pets/"))


class TestOfFsspec(AbstractFixtures, AbstractGetTests):  # type: ignore[misc]  # it has no types
    """fsspec's own suite for `get`; its others (copy, put, open, pipe) write.

    The scenarios are made on a local disk, and then packed.
    """

    @pytest.fixture
    def fs(self, tmp_path: Path) -> DieselFileSystem:
        return Writable(repository=(tmp_path / "s").as_uri())

    @pytest.fixture
    def fs_path(self) -> str:
        return "pets/folder"

    @pytest.fixture
    def packed(self, tmp_path: Path) -> Packed:
        """Make a scenario and pack it. Returns the path of its folder in the dataset."""

        def pack(scenario: Scenario) -> str:
            folder = tmp_path / "scenario"
            scenario(LocalFileSystem(auto_mkdir=True), os.path.join, str(folder / "folder"))
            put_folder((tmp_path / "s").as_uri(), folder)
            return "pets/folder/source"

        return pack

    @pytest.fixture
    def fs_bulk_operations_scenario_0(self, packed: Packed) -> str:
        return packed(self._bulk_operations_scenario_0)

    @pytest.fixture
    def fs_glob_edge_cases_files(self, packed: Packed) -> str:
        return packed(self._glob_edge_cases_files)

    @pytest.fixture
    def fs_dir_and_file_with_same_name_prefix(self, packed: Packed) -> str:
        return packed(self._dir_and_file_with_same_name_prefix)

    @pytest.fixture
    def fs_10_files_with_hashed_names(self, packed: Packed) -> str:
        return packed(self._10_files_with_hashed_names)


def test_files_are_found_and_read(fs: DieselFileSystem, url: str) -> None:
    for path, content in FILES.items():
        assert fs.cat_file(f"pets/{path}") == content
        assert fs.info(f"diesel://pets/{path}")["size"] == len(content)
        with fsspec.open(f"diesel://pets/{path}", repository=url) as file:
            assert file.read() == content
    cats, dog = [f"pets/train/cat/{i}.jpg" for i in (1, 2)], "pets/train/dog/1.jpg"
    assert fs.ls("pets/train/cat", detail=False) == fs.find("pets/train/cat") == cats
    assert fs.ls("pets/train/cat") == [fs.info(each) for each in cats]
    assert fs.ls("pets/empty", detail=False) == ["pets/empty"]
    assert fs.glob("diesel://pets/train/*/1.jpg") == [cats[0], dog]
    assert fs.du("pets/train/cat") == 14
    assert fs.du("pets/train/cat/1.jpg", total=False) == {"pets/train/cat/1.jpg": 7}
    assert fs.isdir("pets/train/")
    assert fs.isdir("pets//train")
    assert fs.isfile("/pets/large")
    assert not fs.isfile("pets/train")
    assert fs.read_text("pets/lines", newline="") == FILES["lines"].decode()
    with fs.open("pets/lines") as file:
        assert [*file] == [b"one\n", b"two\r\n", b"\n", b"last"]
    with fs.open("pets/lines", "rt") as file:
        assert file.readlines() == ["one\n", "two\n", "\n", "last"]
    [path] = fs.glob("pets/*.txt")
    assert path == "pets/\udcff\udcfe.txt"
    assert fs.cat_file(path) == b"not UTF-8"
    with fs.open(path) as file:
        assert file.read() == b"not UTF-8"
    for read in (fs.open, fs.cat_file, lambda path: fs.cat([path])):
        with pytest.raises(IsADirectoryError):
            read("pets/train")
    fs.close()
    fs.close()
    assert fs.cat_file("pets/lines") == FILES["lines"], "it opens again"


def test_the_root_lists_the_datasets(fs: DieselFileSystem, url: str, source: Path) -> None:
    put_folder(url, source / "train", "more")
    assert fs.ls("", detail=False) == ["more", "pets"] == list_datasets(url)
    root = {"size": 0, "type": "directory", "islink": False}
    assert fs.ls("diesel://") == [{"name": name, **root} for name in ("more", "pets")]
    assert fs.isdir("")
    assert fs.isdir("more")
    assert fs.glob("*/cat/2.jpg") == ["more/cat/2.jpg"]
    with pytest.raises(IsADirectoryError):
        fs.open("")


@each_row(
    "path",
    [
        *("pets/none", "pets/train/cat/1.jpg/below", "other/x", "other", "-bad/x", "pets@17/x"),
        *("pets@x/y", "pets/../pets/large", "pets/\0", f"pets/{'n' * 300}", "pets/\ud800"),
    ],
)
def test_missing_paths_are_not_found(fs: DieselFileSystem, path: str) -> None:
    assert not fs.exists(path)
    assert not fs.isfile(path)
    assert not fs.isdir(path)
    for read in (fs.info, fs.open, fs.cat_file, fs.ls, fs.ukey, fs.modified):
        with pytest.raises(FileNotFoundError):
            read(path)


def test_times_and_tokens_follow_the_content(fs: DieselFileSystem, url: str, source: Path) -> None:
    status, info = os.stat(source / "large"), fs.info("pets/large")
    assert (info["mtime"], info["mode"]) == (status.st_mtime_ns / 1e9, status.st_mode)
    assert fs.modified("pets/large").timestamp() == pytest.approx(status.st_mtime)
    before, other = fs.ukey("pets/lines"), fs.checksum("pets/large")
    with connect("pets", url) as dataset:  # the same size and time
        mtime_ns = dataset.stat("lines").mtime_ns
        dataset.put(FILES["lines"][::-1], "lines", mtime_ns=mtime_ns)
    fs.invalidate_cache()
    assert fs.ukey("pets/lines") != before
    assert fs.checksum("pets/large") == other


def test_links_are_followed_inside_the_dataset(fs: DieselFileSystem) -> None:
    assert fs.cat_file("pets/to_file") == b"cat one"
    assert fs.cat_file("pets/train/to_folder/2.jpg") == b"cat two"
    assert fs.cat_file("pets/train/circle/train/circle/lines") == FILES["lines"]
    info = fs.info("pets/to_file")
    assert (info["type"], info["size"], info["islink"]) == ("file", 7, True)
    assert info["destination"] == "train/cat/1.jpg"
    assert fs.isdir("pets/train/to_folder")
    assert fs.ls("pets/train/to_folder", detail=False)[0] == "pets/train/to_folder/1.jpg"
    types = {each["name"]: each["type"] for each in [*fs.ls("pets"), *fs.ls("pets/train")]}
    assert types["pets/to_file"] == "file"
    others = {name for name, kind in types.items() if kind == "other"}
    dead = {"pets/itself", "pets/broken", "pets/outside", "pets/above"}
    assert others == dead | {"pets/train/to_folder", "pets/train/circle"}
    assert "pets/train/circle" in fs.find("pets")  # ends, and does not run in circles
    for path in dead:
        assert not fs.exists(path)
        with pytest.raises(FileNotFoundError):
            fs.open(path)


_SLICES = st.none() | st.integers(-len(LARGE) - 9, len(LARGE) + 9) | st.integers(-20, 20)


@pytest.fixture(scope="module")
def constant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write(tmp_path_factory.mktemp("constant") / "src", FILES)
    put_folder((folder.parent / "store").as_uri(), folder)
    return folder


@examples(60)
@given(st.lists(st.tuples(st.sampled_from([*FILES]), _SLICES, _SLICES), max_size=4))
def test_parts_are_slices(constant: Path, parts: list[tuple[str, int | None, int | None]]) -> None:
    fs = fsspec.filesystem("diesel", repository=(constant.parent / "store").as_uri())
    expected = [FILES[name][i:j] for name, i, j in parts]
    paths = [f"pets/{name}" for name, _, _ in parts]
    starts, ends = [i for _, i, _ in parts], [j for _, _, j in parts]
    assert fs.cat_ranges(paths, starts, ends) == expected
    assert [*map(fs.cat_file, paths, starts, ends)] == expected


@examples(40)
@given(st.data())
def test_an_open_file_reads_as_any_other(constant: Path, data: st.DataObject) -> None:
    """Model test: random seeks and reads, against Python's own files."""
    fs = fsspec.filesystem("diesel", repository=(constant.parent / "store").as_uri())
    name = data.draw(st.sampled_from(["large", "lines", "empty"]))
    cache_type = data.draw(st.sampled_from(["readahead", "none", "bytes", "background", "all"]))
    block_size = data.draw(st.sampled_from([None, 1000, 1 << 20]))
    with (
        fs.open(f"pets/{name}", cache_type=cache_type, block_size=block_size) as file,
        (constant / name).open("rb") as model,
    ):
        for _ in range(data.draw(st.integers(1, 8))):
            whence = data.draw(st.sampled_from([os.SEEK_SET, os.SEEK_END]))
            size = file.size
            offset = data.draw(st.integers(0, size)) - (size if whence == os.SEEK_END else 0)
            assert file.seek(offset, whence) == model.seek(offset, whence)
            count = data.draw(st.integers(-1, 3000) | st.just(2 << 20))
            match data.draw(st.sampled_from(["read", "readinto", "readline"])):
                case "read":
                    assert file.read(count) == model.read(count)
                case "readinto":
                    room, other = bytearray(max(count, 0)), bytearray(max(count, 0))
                    assert file.readinto(room) == model.readinto(other)
                    assert room == other
                case "readline":
                    assert file.readline(count) == model.readline(count)
            assert file.tell() == model.tell()


def test_many_files_at_once(fs: DieselFileSystem, url: str, source: Path) -> None:
    put_folder(url, source / "train", "more")
    expected = {
        "pets/large": LARGE, "more/cat/1.jpg": b"cat one", "pets/lines": FILES["lines"],
        "pets/to_file": b"cat one", "more/dog/1.jpg": b"dog",
    }  # fmt: skip
    paths, missing = [*expected], [*expected, "pets/none"]
    assert fs.cat(paths) == expected
    assert fs.cat("pets/lines") == FILES["lines"]
    assert fs.cat(["pets/lines"]) == {"pets/lines": FILES["lines"]}
    found = fs.cat("pets/train/*/1.jpg")
    assert found == {"pets/train/cat/1.jpg": b"cat one", "pets/train/dog/1.jpg": b"dog"}
    assert fs.cat("more", recursive=True, on_error="omit") == {
        f"more/{path[6:]}": content for path, content in FILES.items() if path.startswith("train/")
    }
    assert fs.cat(paths, start=1, end=3) == {each: expected[each][1:3] for each in paths}
    with pytest.raises(FileNotFoundError):
        fs.cat(missing)
    assert fs.cat(missing, on_error="omit") == expected
    found = fs.cat(missing, on_error="return")
    assert isinstance(found, dict)
    assert isinstance(found["pets/none"], FileNotFoundError)
    [good, bad] = fs.cat_ranges(["pets/lines", "pets/none"], 0, 3)
    assert good == b"one"
    assert isinstance(bad, FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges(["pets/none"], 0, 3, on_error="raise")


def test_each_chunk_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cat` of all files, in an order that jumps between chunks, reads each chunk once."""
    files = {f"{i:03}": os.urandom(30_000) for i in range(200)}
    url = (tmp_path / "s").as_uri()
    put_folder(url, write(tmp_path / "many", files))
    fs = fsspec.filesystem("diesel", repository=url)
    paths = [f"pets/{i * 77 % 200:03}" for i in range(200)]
    with monkeypatch.context() as patch:
        ways = ((FolderReads, "read"), (FolderStore, "read_into"))
        reads = [Mock(wraps=getattr(owner, way)) for owner, way in ways]
        for (owner, way), counted in zip(ways, reads, strict=True):
            patch.setattr(owner, way, partialmethod(counted))
        assert fs.cat(paths) == {f"pets/{name}": content for name, content in files.items()}
    with connect("pets", url) as dataset:
        assert 0 < sum(each.call_count for each in reads) <= dataset.snapshot.chunk_count


def test_a_damaged_file_fails_alone(fs: DieselFileSystem, tmp_path: Path) -> None:
    for chunk in (tmp_path / "store").glob("datasets/*/chunks/*/*"):
        chunk.chmod(0o600)
        chunk.write_bytes(chunk.read_bytes().replace(b"cat one", b"cat 0ne"))
    paths = ["pets/lines", "pets/train/cat/1.jpg", "pets/train/cat/2.jpg"]
    found = fs.cat(paths, on_error="return")
    assert isinstance(found, dict)
    assert isinstance(found[paths[1]], CorruptError)
    assert (found[paths[0]], found[paths[2]]) == (FILES["lines"], b"cat two")
    with pytest.raises(CorruptError):
        fs.cat_file(paths[1])


def test_versions(fs: DieselFileSystem, url: str) -> None:
    with connect("pets", url) as dataset:
        dataset.purge(keep=3)
        first = dataset.version
        with fs.open("pets/lines", cache_type="none") as file:
            assert file.read(2) == b"on"
            dataset.put(b"quite another text", "lines")
            dataset.put(b"new", "aaa")  # all indices move
            dataset.flush()
            assert fs.cat_file("pets/lines") == FILES["lines"]
            assert fs.cat_file("pets/aaa") == b"new"  # only the newer version has it
            assert fs.cat_file("pets/lines") == b"quite another text"
            assert file.read() == FILES["lines"][2:]
        dataset.put(b"third", "lines")
        dataset.flush()
    assert fs.cat_file("pets/lines") == b"quite another text"
    fs.invalidate_cache("pets/lines")
    assert fs.cat_file("pets/lines") == b"third"
    assert fs.cat_file(f"pets@{first}/lines") == FILES["lines"]
    fs.invalidate_cache()
    assert fs.cat_file(f"diesel://pets@{first}/lines") == FILES["lines"]
    assert not fs.exists(f"pets@{first}/aaa")
    assert fs.ls(f"pets@{first}/train/dog", detail=False) == [f"pets@{first}/train/dog/1.jpg"]


@each_row(
    ("way", "arguments"),
    [
        *(("open", ("pets/new", mode)) for mode in ("wb", "w", "xb")),
        ("open", ("pets/lines", "ab")),
        ("pipe", ("pets/new", b"x")),
        ("write_text", ("pets/new", "x")),
        ("write_bytes", ("pets/new", b"x")),
        *((way, (__file__, "pets/new")) for way in ("put", "put_file")),
        *((way, ("pets/new",)) for way in ("mkdir", "mkdirs", "touch")),
        ("makedirs", ("pets/new", True)),
        ("rmdir", ("pets/train",)),
        *((way, ("pets/lines", "pets/new")) for way in ("copy", "cp_file", "mv", "rename")),
        *((way, ("pets/lines",)) for way in ("rm", "rm_file")),
        ("delete", ("pets/train", True)),
        ("start_transaction", ()),
    ],
)
def test_writing_is_refused(fs: DieselFileSystem, way: str, arguments: tuple[object, ...]) -> None:
    before = fs.find("pets")
    with pytest.raises(OSError, match="read-only; write with `dlcmd put`") as error:
        getattr(fs, way)(*arguments)
    assert error.value.errno == errno.EROFS
    fs.invalidate_cache()
    assert fs.find("pets") == before


def test_it_opens_like_connect(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DIESEL_URL", url)
    with fsspec.open("diesel://pets/lines") as file:
        assert file.read() == FILES["lines"]
    other = fsspec.filesystem("diesel", repository=(tmp_path / "none").as_uri())
    for read in (other.cat_file, other.exists):  # and the failure is not reported as absence
        with pytest.raises(ObjectStoreError):
            read("pets/lines")
    with pytest.raises(UsageError, match=r"no option 'url'; known: .*repository"):
        fsspec.filesystem("diesel", url=url)
    with pytest.raises(UsageError, match="task"):
        fsspec.filesystem("diesel", repository=url, world=2).info("pets")
    assert fsspec.filesystem("diesel", repository=url, use_listings_cache=False).exists("pets")


def test_options_of_other_protocols_are_ignored(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Libraries pass the options of one protocol to all. A pickle does not contain them."""
    others = {"client_kwargs": {"trust_env": True}, "token": "of the hub", "anon": False}
    fs = fsspec.filesystem("diesel", repository=url, **others)
    assert fs.cat_file("pets/lines") == FILES["lines"]
    assert caplog.messages == []
    pickled = bytes(ForkingPickler.dumps(fs))
    assert b"of the hub" not in pickled
    assert ForkingPickler.loads(pickled).exists("pets/lines")
    with fsspec.open("diesel://pets/lines", repository=url, memory=1 << 20, **others) as file:
        assert file.read() == FILES["lines"]
    assert caplog.messages == ["diesel:// has no option 'memory'; is memory_bytes meant?"]


def test_a_path_below_a_file_is_not_found(fs: DieselFileSystem) -> None:
    """The error is the one of a disk, and a FileNotFoundError, too, for programs that know only
    that."""
    for path in ("pets/lines/x", "pets/lines/..", "pets/to_file/x/y"):
        for read in (fs.info, fs.open, fs.cat_file, fs.ls):
            with pytest.raises(NotADirectoryError) as error:
                read(path)
            assert error.value.errno == errno.ENOTDIR
            assert isinstance(error.value, FileNotFoundError)
        assert (fs.find(path), fs.isdir(path)) == ([], False)


def test_a_denial_by_the_server_is_a_permission_error(tmp_path: Path, source: Path) -> None:
    with served(tmp_path, source) as (server, options):
        other = {**options, "key": new_repository((tmp_path / "other").as_uri())["root"].key_text}
        fs = fsspec.filesystem("diesel", repository=server.url, **other)
        for read in (fs.info, fs.exists):
            with pytest.raises(PermissionError, match="no such user, or another key"):
                read("pets/lines")


@contextmanager
def served(
    tmp_path: Path, source: Path, *arguments: str | Path
) -> Iterator[tuple[Server, dict[str, str]]]:
    store = (tmp_path / "served").as_uri()
    account = new_repository(store)["root"]
    put_folder(store, source)
    with Server(tmp_path / "run", "--store", store, *arguments) as server:
        yield server, {"user": account.user, "key": account.key_text}


def test_servers_in_paths(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tmp_path, source) as (server, options):
        host_port = server.url.removeprefix("diesel://")
        fs = fsspec.filesystem("diesel", repository=server.url, **options)
        assert fs.cat_file("pets/lines") == FILES["lines"]
        assert fs.cat_file(f"{server.url}/pets/lines") == FILES["lines"]

        monkeypatch.setenv("DIESEL_URL", "file:///nowhere")
        with fsspec.open(f"{server.url}/pets/train/dog/1.jpg", **options) as file:
            assert file.read() == b"dog"
            assert file.full_name == f"{server.url}/pets/train/dog/1.jpg"
        fs = fsspec.filesystem("diesel", **options)
        assert fs.ls(server.url, detail=False) == [f"{host_port}/pets"]
        assert fs.find(f"{server.url}/pets/train/dog") == [f"{host_port}/pets/train/dog/1.jpg"]
        [found] = fs.glob(f"{server.url}/pets/train/d*/*")
        assert fs.cat_file(fs.unstrip_protocol(found)) == b"dog"
        other = fsspec.filesystem("diesel", repository="diesel://h:1", **options)
        with pytest.raises(UsageError, match="another server"):
            other.info(f"{server.url}/pets")
        fs.close()


def test_a_server_with_tls(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path / "authority")
    files = authority.issue()
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
    arguments = ("--tls-cert", files.certificate, "--tls-key", files.key)
    with served(tmp_path, source, *arguments) as (server, options):
        address = f"diesel+tls://localhost:{server.port}"
        with fsspec.open(f"{address}/pets/lines", **options) as file:
            assert file.read() == FILES["lines"]
            assert file.full_name == f"{address}/pets/lines"
        fs = fsspec.filesystem("diesel", repository=address, **options)
        assert fs.cat_file("pets/lines") == FILES["lines"]
        fs.close()


@each_row(
    ("protocol", "path"),
    [("diesel", "h:x/pets/a"), ("diesel", ":1/pets"), ("diesel+tls", "pets/a"), ("diesel+tls", "")],
)
def test_a_bad_server_is_refused(protocol: str, path: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT/DATASET/path"):
        fsspec.filesystem(protocol).info(path)


def test_threads_share_open_datasets(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Mock(wraps=connect)
    monkeypatch.setattr("diesel_fs.torch.fsspec.connect", opened)

    def read(_: int) -> object:
        with fsspec.open("diesel://pets/lines", repository=url) as file:
            return file.read()

    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(read, range(8))] == [FILES["lines"]] * 8
    assert opened.call_count == 1


def _read_in_child(fs: DieselFileSystem, url: str) -> tuple[bytes, bytes]:
    with fsspec.open("diesel://pets/train/dog/1.jpg", repository=url) as file:
        return fs.cat_file("pets/lines"), file.read()


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_other_processes_read_too(fs: DieselFileSystem, url: str, way: str) -> None:
    assert fs.exists("pets/lines")
    with multiprocessing.get_context(way).Pool(2) as pool:
        found = pool.starmap(_read_in_child, [(fs, url)] * 4)
    assert found == [(FILES["lines"], b"dog")] * 4
    assert fs.cat_file("pets/large") == LARGE


def test_a_pickle_opens_the_same_and_holds_no_secret(
    fs: DieselFileSystem, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = ForkingPickler.loads(ForkingPickler.dumps(fs))
    assert again.cat_file("pets/lines") == FILES["lines"]
    with fs.open("pets/lines") as file:
        file.seek(4)
        with ForkingPickler.loads(ForkingPickler.dumps(file)) as other:
            assert other.read() == FILES["lines"][4:]

    secret = fsspec.filesystem("diesel", repository="diesel://h:1", user="me", key="dk_secret")
    with pytest.raises(UsageError, match="set DIESEL_KEY"):
        ForkingPickler.dumps(secret)
    monkeypatch.setenv("DIESEL_KEY", "dk_secret")
    assert b"dk_secret" not in bytes(ForkingPickler.dumps(secret))
    with_password = "file:///x?meta=redis://:password@h"  # noqa: S105  # not a real one
    secret = fsspec.filesystem("diesel", repository=with_password)
    with pytest.raises(UsageError, match="set DIESEL_URL"):
        ForkingPickler.dumps(secret)
    monkeypatch.setenv("DIESEL_URL", with_password)
    assert b"password" not in bytes(ForkingPickler.dumps(secret))


def test_torch_is_not_imported_and_a_missing_fsspec_is_named(url: str) -> None:
    code = """if True:
        import sys, fsspec
        with fsspec.open("diesel://pets/empty", repository=sys.argv[1]) as file:
            assert file.read() == b""
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code, url], check=True)
    code = """if True:
        import sys
        sys.modules["fsspec"] = None
        import diesel_fs.torch.fsspec
    """
    command = [sys.executable, "-c", code]
    failed = subprocess.run(command, check=False, capture_output=True, text=True)
    assert "`pip install fsspec`" in failed.stderr
