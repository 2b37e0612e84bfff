"""All sessions, and ext4, over the same trees: the result or errno of each call must be the same.

The device number may differ (st_dev, f_fsid), and the results that `PAIRS` names.
"""

import ctypes
import errno
import fcntl
import functools
import os
import random
import stat
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from diesel_fs.mounts import MountRequest, stats
from diesel_fs.mounts.launcher import log_path
from diesel_fs.mounts.sessions.protocol import Flag
from tests.mounts.conftest import ODD_NAMES, TESTED_SESSIONS, mounting, request_for
from tests.mounts.folder_daemon import LACKING
from tests.mounts.observed import current_stats, figures, mounted, put, waiting_reads
from tests.rows import each_row
from tests.tiers import fast_first
from tests.waiting import wait_until

pytestmark = pytest.mark.fuse

SEEDS = (1, 2)
LARGE_ENTRIES = 4100  # more than one part of READDIRPLUS answers
SIZES = (0, 1, 4095, 4096, 4097, 8192, 65_535, 65_536, 131_072, 131_073, 1_048_576, 1_048_577)

libc = ctypes.CDLL(None, use_errno=True)

Call = Callable[[bytes], object]
Pair = tuple[Path, Path]


def make_tree(root: Path, seed: int) -> None:
    """A random tree: odd names, links, empty and page-sized files, deep and large folders.

    Some links lead out of it, to a file beside it: some calls write through links.
    """
    noise = random.Random(seed)
    top = os.fsencode(root)
    outside = root.with_name("outside")
    outside.write_bytes(b"outside of the tree")
    folders = [top]
    for name in noise.sample(ODD_NAMES, 8):
        folders.append(os.path.join(noise.choice(folders), b"d" + name[:200]))
        os.mkdir(folders[-1], noise.choice([0o700, 0o755, 0o555]))
    deep = top
    for level in range(60):
        deep = os.path.join(deep, b"%d-%s" % (level, b"x" * noise.randrange(30)))
        os.mkdir(deep)
    folders.append(deep)
    for number, name in enumerate(ODD_NAMES * 3):
        path = os.path.join(noise.choice(folders), name[:240] + b"%d" % number)
        kind = noise.random()
        if kind < 0.15:
            targets = [b"..", b"nowhere", os.fsencode(outside), name, b"x" * 4000]
            os.symlink(noise.choice(targets), path)
            continue
        with open(path, "wb") as file:
            file.write(noise.randbytes(noise.choice(SIZES)))
        os.chmod(path, noise.choice([0o644, 0o600, 0o755, 0o444, 0o000]))
        mtime_ns = noise.choice([-1, 0, 1, 10**18, -(10**18) - 1, 4_900_000_000_123_456_789])
        os.utime(path, ns=(mtime_ns, mtime_ns))
    large = os.path.join(top, b"large")
    os.mkdir(large)
    for number in range(LARGE_ENTRIES):
        name = b"%d-%s" % (number, noise.choice(ODD_NAMES)[:200])
        os.close(os.open(os.path.join(large, name), os.O_CREAT | os.O_WRONLY, 0o644))


@dataclass(frozen=True, slots=True)
class Trees:
    source: Path
    at: Mapping[str, Path]

    def pair(self, names: tuple[str, str]) -> Pair:
        return self.at[names[0]], self.at[names[1]]


@pytest.fixture(scope="module", params=fast_first(SEEDS))
def trees(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trees]:
    base = tmp_path_factory.mktemp("trees")
    source = base / "source"
    source.mkdir()
    make_tree(source, int(request.param))
    (base / "ext4").mkdir()
    image = base / "image"
    subprocess.run(["mkfs.ext4", "-q", "-b", "4096", image, "300M"], check=True)
    with ExitStack() as held:
        at = {
            name: held.enter_context(mounting(source, base / name, name, allow_other=True)).at
            for name in TESTED_SESSIONS
        }
        subprocess.run(["mount", "-o", "loop,nosuid,nodev", image, base / "ext4"], check=True)
        held.callback(lambda: subprocess.run(["umount", base / "ext4"], check=True))
        subprocess.run(["cp", "-a", f"{source}/.", base / "ext4"], check=True)
        subprocess.run(["mount", "-o", "remount,ro,noatime", base / "ext4"], check=True)
        yield Trees(source, {**at, "ext4": base / "ext4"})


@functools.cache
def paths_below(root: Path) -> list[bytes]:
    top = os.fsencode(root)
    found = [b"."]
    for folder, inner, files in os.walk(top):
        found += [os.path.relpath(os.path.join(folder, name), top) for name in inner + files]
    return sorted(found)


def outcome(call: Call, path: bytes) -> object:
    try:
        return call(path)
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, error.errno)


def lstat(path: bytes) -> object:
    found = os.lstat(path)
    names = [name for name in dir(found) if name.startswith("st_") and name != "st_dev"]
    return {name: getattr(found, name) for name in names}


def opened(flags: int) -> Call:
    def call(path: bytes) -> object:
        descriptor = os.open(path, flags | os.O_CLOEXEC)
        try:
            return os.fstat(descriptor).st_ino, fcntl.fcntl(descriptor, fcntl.F_GETFL)
        finally:
            os.close(descriptor)

    return call


def on_open(flags: int, work: Callable[[int], object]) -> Call:
    def call(path: bytes) -> object:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return work(descriptor)
        finally:
            os.close(descriptor)

    return call


def statvfs(path: bytes) -> object:
    """All fields but those that differ between mounts, and free space, which changes."""
    found = os.statvfs(path)
    others = ("f_fsid", "f_bfree", "f_bavail", "f_ffree", "f_favail")
    names = (name for name in dir(found) if name.startswith("f_") and name not in others)
    return tuple(getattr(found, name) for name in names)


def listed(path: bytes) -> object:
    return [
        (entry.name, entry.inode(), entry.is_symlink(), entry.is_dir(follow_symlinks=False))
        for entry in os.scandir(path)
    ]


def raw_listed(room_bytes: int) -> Call:
    def work(descriptor: int) -> object:
        room = ctypes.create_string_buffer(room_bytes)
        found = []
        while (count := libc.syscall(217, descriptor, room, room_bytes)) > 0:
            found.append(room.raw[:count])
        if count < 0:
            raise OSError(ctypes.get_errno(), "getdents64")
        entries = b"".join(found)
        at, names = 0, []
        while at < len(entries):
            number = int.from_bytes(entries[at : at + 8], "little")
            offset = int.from_bytes(entries[at + 8 : at + 16], "little")
            length = int.from_bytes(entries[at + 16 : at + 18], "little")
            name = entries[at + 19 : at + length].split(b"\0")[0]
            names.append((number, offset, entries[at + 18], name))
            at += length
        return names

    return on_open(os.O_RDONLY | os.O_DIRECTORY, work)


def locked(descriptor: int) -> object:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    fcntl.lockf(descriptor, fcntl.LOCK_UN)
    return "locked"


FLAGS = (
    *("O_RDONLY", "O_WRONLY", "O_RDWR", "O_TRUNC", "O_APPEND", "O_DIRECTORY", "O_NOFOLLOW"),
    *("O_PATH", "O_NOATIME", "O_DIRECT", "O_CREAT", "O_EXCL", "O_SYNC", "O_NONBLOCK", "O_TMPFILE"),
)

CALLS: dict[str, Call] = {
    "lstat": lstat,
    "stat": lambda path: os.stat(path).st_ino,
    "readlink": os.readlink,
    "listxattr": os.listxattr,
    "getxattr": lambda path: os.getxattr(path, b"user.x"),
    "getxattr acl": lambda path: os.getxattr(path, b"system.posix_acl_access"),
    "setxattr": lambda path: os.setxattr(path, b"user.x", b"y"),
    "statfs": statvfs,
    "access": lambda path: [os.access(path, mode) for mode in (0, 1, 2, 4)],
    "unlink": os.unlink,
    "rmdir": os.rmdir,
    "mkdir in it": lambda path: os.mkdir(path + b"/new"),
    "truncate": lambda path: os.truncate(path, 0),
    "chmod": lambda path: os.chmod(path, 0o600),
    "utime": os.utime,
    "below it": lambda path: os.stat(path + b"/below"),
    "too long": lambda path: os.stat(path + b"/" + b"x" * 256),
    "locks": on_open(os.O_RDONLY, locked),
    "mandatory": on_open(os.O_RDONLY, lambda file: os.lseek(file, 0, os.SEEK_DATA)),
    "seek end": on_open(os.O_RDONLY, lambda file: os.lseek(file, 0, os.SEEK_END)),
    "seek hole": on_open(os.O_RDONLY, lambda file: os.lseek(file, 0, os.SEEK_HOLE)),
    "fsync": on_open(os.O_RDONLY, os.fsync),
    "terminal": on_open(os.O_RDONLY, os.isatty),
    "flags ioctl": on_open(os.O_RDONLY, lambda file: fcntl.ioctl(file, 0x80086601, bytes(8))),
    "read": on_open(os.O_RDONLY, lambda file: os.read(file, 100)),
    "list": listed,
    **{f"open {name}": opened(getattr(os, name)) for name in FLAGS},
}


# The differences: SEMANTICS.md has the list, and `test_differences.py` the tests.

Known = Callable[[object, bool], object]
"""Takes an outcome, and whether it is a folder's, and leaves out the parts that may differ."""


def nothing(outcome: object, is_folder: bool) -> object:
    return None


def of_files(outcome: object, is_folder: bool) -> object:
    return None if is_folder else outcome


def of_folders(outcome: object, is_folder: bool) -> object:
    return type(outcome) if is_folder else None


def but_the_inode(outcome: object, is_folder: bool) -> object:
    return outcome[1:] if isinstance(outcome, tuple) else outcome


def without(*fields: str, of_folder: Sequence[str] = ()) -> Known:
    def rest(outcome: object, is_folder: bool) -> object:
        if not isinstance(outcome, dict):
            return outcome
        left_out = (*fields, *of_folder) if is_folder else fields
        return {name: value for name, value in outcome.items() if name not in left_out}

    return rest


def kinds_and_names(outcome: object, is_folder: bool) -> object:
    if not isinstance(outcome, list):
        return outcome
    listed = {(name, is_link, is_inner) for name, _, is_link, is_inner in outcome}
    return listed - {(b"lost+found", False, True)}


OPENS = {f"open {name}": but_the_inode for name in FLAGS}
IN_NATIVE: dict[str, Known] = {
    **OPENS,
    "stat": nothing,
    "getxattr acl": nothing,
    "list": kinds_and_names,
    "open O_DIRECT": of_folders,
    "fsync": nothing,
    "statfs": nothing,
    "seek end": of_files,
    "seek hole": of_files,
}
TIMES = ("st_atime", "st_atime_ns", "st_ctime", "st_ctime_ns")
PAIRS: dict[tuple[str, str], dict[str, Known]] = {
    ("kernel", "pyfuse3"): {},
    ("kernel", "native"): {
        **IN_NATIVE,
        "lstat": without("st_ino", "st_blocks", of_folder=["st_size"]),
        "listxattr": nothing,
        "getxattr": nothing,
        "mandatory": of_files,
    },
    ("ext4", "native"): {
        **IN_NATIVE,
        "lstat": without("st_ino", "st_blocks", *TIMES, of_folder=["st_size", "st_nlink"]),
        "flags ioctl": nothing,
    },
}


def whole(outcome: object, is_folder: bool) -> object:
    return outcome


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
@each_row("name", sorted(CALLS))
def test_a_call_gives_the_same_over_both(trees: Trees, name: str, pair: tuple[str, str]) -> None:
    noise = random.Random(name)
    below = paths_below(trees.source)
    paths = [path for path in below if not path.startswith(b"large/")]
    paths += [b"no such name", b"large/no such name"]
    paths += noise.sample([path for path in below if path.startswith(b"large/")], 20)
    shown = PAIRS[pair].get(name, whole)
    top = os.fsencode(trees.source)
    differing = {}
    for path in paths:
        is_folder = os.path.isdir(os.path.join(top, path))
        results = [
            shown(outcome(CALLS[name], os.path.join(os.fsencode(at), path)), is_folder)
            for at in trees.pair(pair)
        ]
        if results[0] != results[1]:
            differing[path] = results
    assert not differing


@pytest.mark.parametrize("pair", [("kernel", "pyfuse3"), ("kernel", "native")], ids=" and ".join)
@each_row("room_bytes", [300, 1024, 4096, 65_536])
def test_folders_are_listed_alike(trees: Trees, room_bytes: int, pair: tuple[str, str]) -> None:
    """They agree across the parts of a large folder, too."""
    top = os.fsencode(trees.source)
    folders = [
        path
        for path in paths_below(trees.source)
        if stat.S_ISDIR(os.lstat(os.path.join(top, path)).st_mode)
    ]
    for path in folders if room_bytes == 4096 else [b".", b"large"]:
        results = []
        for at in trees.pair(pair):
            found = outcome(raw_listed(room_bytes), os.path.join(os.fsencode(at), path))
            assert isinstance(found, list)
            results.append(sorted(each[2:] for each in found) if "native" in pair else found)
        assert results[0] == results[1]


def test_contents_and_reads_at_any_offset_are_alike(trees: Trees) -> None:
    source = trees.source
    noise = random.Random(5)
    for path in paths_below(source):
        real = os.path.join(os.fsencode(source), path)
        if not stat.S_ISREG(os.lstat(real).st_mode):
            continue
        with open(real, "rb") as file:
            content = file.read()
        if not content and path.startswith(b"large/"):
            continue
        for at in trees.at.values():
            descriptor = os.open(os.path.join(os.fsencode(at), path), os.O_RDONLY)
            for _ in range(8):
                place = noise.randrange(len(content) + 5000)
                length = noise.choice([1, 10, 4096, 70_000, 2_000_000])
                assert os.pread(descriptor, length, place) == content[place : place + length]
            os.close(descriptor)
            with open(os.path.join(os.fsencode(at), path), "rb") as opened_file:
                assert opened_file.read() == content


def test_files_of_several_extents_are_alike_at_their_edges(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    contents = {
        "several": random.Random(1).randbytes(11_000_003),
        "edge": random.Random(2).randbytes(4 << 20),
        "small": b"s" * 10,
    }
    put(url, contents)
    edges = [0, 4096, 65_536, 1 << 20, 4 << 20, (4 << 20) - 65_536, 8 << 20, 11_000_000]
    for name in TESTED_SESSIONS:
        with mounted(MountRequest(url, "ds", str(tmp_path / name), session=name)) as at:
            for file, content in contents.items():
                descriptor = os.open(at / file, os.O_RDONLY)
                for edge in edges:
                    for place in (edge - 1, edge, edge + 1):
                        for length in (1, 2, 4097, 1_100_000):
                            found = os.pread(descriptor, length, max(place, 0))
                            assert found == content[max(place, 0) :][:length]
                os.close(descriptor)
                assert (at / file).read_bytes() == content


def test_sixteen_readers_have_sixteen_fetches_under_way(tmp_path: Path, session: str) -> None:
    """The store answers none of them before all sixteen wait."""
    source = tmp_path / "source"
    source.mkdir()
    for number in range(16):
        (source / f"wait{number}").write_bytes(b"%d" % number * 1000)
    with mounting(source, tmp_path / "mount", session) as mounted:
        with ThreadPoolExecutor(16) as readers:
            files = [mounted.at / f"wait{number}" for number in range(16)]
            found = readers.map(Path.read_bytes, files)
            wait_until(lambda: waiting_reads(mounted.at) >= 16)
            mounted.release_reads()
            assert list(found) == [b"%d" % number * 1000 for number in range(16)]
        assert (
            figures(current_stats(mounted.at), "cache")["at_once_max"] >= 16
        )  # in a native mount some are read ahead, too


def test_auto_falls_back_if_the_kernel_lacks_something(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LACKING, str(int(Flag.NO_OPENDIR_SUPPORT)))
    with mounting(source, tmp_path / "mount", "auto") as mounted:
        assert stats(mounted.at)["session"] == "pyfuse3"
        assert (mounted.at / "b").read_bytes() == b"beta"
        log = log_path(request_for(source, mounted.at)).read_text()
        assert "the kernel session cannot be used: the kernel lacks" in log
        assert "NO_OPENDIR_SUPPORT" in log
        assert Path("/proc/self/mounts").read_text().count(str(mounted.at)) == 1
