"""`atomic_file` and `log_file`: whole or not at all; devices and fifos stay; planted links and
files (made by another user where others may write) are refused."""

import os
import stat
import threading
from pathlib import Path

import pytest

from diesel_fs.client.dataset import connect
from diesel_fs.errors import PermissionDenied, UsageError
from diesel_fs.system.atomic_file import atomic_file
from diesel_fs.system.daemons import log_file

from ..cli.conftest import Dlcmd as Dlcmd
from ..cli.conftest import dlcmd as dlcmd
from ..unprivileged_user import USER, needs_root


def write(path: Path, content: bytes, *, sync: bool = True) -> None:
    with atomic_file(path, sync=sync) as file:
        file.write(content)


@pytest.mark.parametrize("sync", [True, False])
def test_a_file_appears_when_it_is_whole(tmp_path: Path, sync: bool) -> None:
    path = tmp_path / "file"
    write(path, b"1", sync=sync)
    before = path.open("rb")
    with atomic_file(path, mode=0o640, sync=sync) as file:
        file.write(b"22")
        file.flush()
        assert path.read_bytes() == b"1"
    assert path.read_bytes() == b"22"
    os.umask(umask := os.umask(0o022))
    assert stat.S_IMODE(path.stat().st_mode) == 0o640 & ~umask
    with before:
        assert before.read() == b"1"
    with pytest.raises(TypeError):
        write(path, "no bytes")  # type: ignore[arg-type]  # a fault is put in
    assert path.read_bytes() == b"22"
    assert [*tmp_path.iterdir()] == [path]


def test_a_link_is_followed(tmp_path: Path) -> None:
    """A link to a missing file makes that file."""
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link"
    link.symlink_to("folder/file")
    for content in (b"1", b"2"):
        write(link, content)
        assert link.is_symlink()
        assert (tmp_path / "folder/file").read_bytes() == content
    assert len([*tmp_path.rglob("*")]) == 3


def test_a_fifo_stays_a_fifo(tmp_path: Path) -> None:
    """So does a link to a fifo."""
    fifo, link = tmp_path / "fifo", tmp_path / "link"
    os.mkfifo(fifo)
    link.symlink_to(fifo)
    for path in (fifo, link):
        writer = threading.Thread(target=write, args=(path, b"words"), daemon=True)
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        writer.start()
        writer.join(10)
        assert not writer.is_alive()
        assert os.read(reader, 100) == b"words"
        os.close(reader)
    assert stat.S_ISFIFO(fifo.lstat().st_mode)
    assert {*tmp_path.iterdir()} == {fifo, link}


@pytest.mark.skipif(os.getuid() != 0, reason="only root makes devices")
def test_a_device_stays_a_device(tmp_path: Path) -> None:
    device = tmp_path / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        device.open("rb").close()
    except OSError as error:
        pytest.skip(f"no device can be made here: {error}")
    write(device, b"words")
    assert stat.S_ISCHR(device.lstat().st_mode)
    assert [*tmp_path.iterdir()] == [device]


def test_an_open_file_without_a_name_is_written_to(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        file.write(b"longer than that")
        file.flush()
        (tmp_path / "file").unlink()
        write(Path(f"/proc/self/fd/{file.fileno()}"), b"words")
        file.seek(0)
        assert file.read() == b"words"
    assert [*tmp_path.iterdir()] == []


def test_an_error_names_the_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        write(tmp_path, b"")
    missing = tmp_path / "none/file"
    with pytest.raises(FileNotFoundError) as caught:
        write(missing, b"")
    assert caught.value.filename == str(missing)


# Links and files that another user has planted


def append(path: Path, content: bytes) -> None:
    with log_file(path) as file:
        file.write(content)


WRITERS = {"whole": write, "log": append}


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder where every user may write. It has no sticky bit, unlike /tmp: there many kernels
    themselves refuse to follow planted links."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def planted(path: Path) -> Path:
    """The path, which now belongs to another user."""
    os.chown(path, USER, USER, follow_symlinks=False)
    return path


@needs_root
@pytest.mark.parametrize("way", WRITERS)
@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o775])
def test_a_planted_link_is_not_followed(tmp_path: Path, shared: Path, way: str, mode: int) -> None:
    """Neither a link to a file of ours, nor a link to a missing file."""
    shared.chmod(mode)
    (tmp_path / "ours").write_bytes(b"ours")
    for target in ("ours", "new"):
        link = shared / f"to-{target}"
        link.symlink_to(tmp_path / target)
        planted(link)
        with pytest.raises(PermissionDenied, match="another user may have planted"):
            WRITERS[way](link, b"theirs")
    assert (tmp_path / "ours").read_bytes() == b"ours"
    assert not (tmp_path / "new").exists()


@needs_root
@pytest.mark.parametrize("way", WRITERS)
def test_a_planted_link_on_the_way_is_not_followed(tmp_path: Path, shared: Path, way: str) -> None:
    """Nor if a link of our own leads to it."""
    (tmp_path / "private").mkdir()
    (shared / "folder").symlink_to(tmp_path / "private")
    planted(shared / "folder")
    (tmp_path / "ours").symlink_to(shared / "folder/file")
    for path in (shared / "folder/file", tmp_path / "ours", shared / "folder/../folder/file"):
        with pytest.raises(PermissionDenied, match="another user may have planted"):
            WRITERS[way](path, b"theirs")
    assert not [*(tmp_path / "private").iterdir()]


@needs_root
@pytest.mark.parametrize("way", WRITERS)
def test_other_links_are_followed(tmp_path: Path, shared: Path, way: str) -> None:
    (shared / "ours").symlink_to(tmp_path / "file")
    WRITERS[way](shared / "ours", b"1")
    assert (tmp_path / "file").read_bytes() == b"1"
    private = tmp_path / "private"
    private.mkdir(mode=0o755)
    (private / "link").symlink_to(tmp_path / "other")
    planted(private / "link")  # its maker may no longer write there
    WRITERS[way](private / "link", b"2")
    assert (tmp_path / "other").read_bytes() == b"2"


@needs_root
def test_a_log_is_not_written_to_a_planted_file(tmp_path: Path, shared: Path) -> None:
    """The owner of the file could read the log, and a hard link could lead to a file of ours."""
    (shared / "theirs").touch()
    planted(shared / "theirs")
    (tmp_path / "ours").write_bytes(b"ours")
    os.link(tmp_path / "ours", shared / "linked")
    os.mkfifo(shared / "fifo")
    planted(shared / "fifo")
    for name in ("theirs", "linked", "fifo"):
        with pytest.raises(PermissionDenied, match="another user may have planted"):
            append(shared / name, b"log")
    assert (tmp_path / "ours").read_bytes() == b"ours"


@needs_root
def test_nothing_is_written_into_a_planted_fifo(shared: Path) -> None:
    os.mkfifo(shared / "fifo")
    planted(shared / "fifo")
    reader = os.open(shared / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(PermissionDenied, match="another user may have planted"):
        write(shared / "fifo", b"secret")
    assert os.read(reader, 10) == b""
    os.close(reader)


@needs_root
@pytest.mark.parametrize("command", ["save-meta", "get", "get --tar", "mount --log-file"])
def test_no_verb_writes_through_a_planted_link(
    dlcmd: Dlcmd, tmp_path: Path, shared: Path, command: str
) -> None:
    """The verb ends with exit code 12, and the target of the link is unchanged."""
    with connect("pets", dlcmd.store.as_uri(), create=True) as dataset:
        dataset.put(b"content", "cat")
    ours, link = tmp_path / "ours", shared / "link"
    if command == "get":
        ours.mkdir()
    else:
        ours.write_bytes(b"ours")
    link.symlink_to(ours)
    planted(link)
    words: dict[str, list[str | Path]] = {
        "save-meta": ["save-meta", "pets", link],
        "get": ["get", "pets", link],
        "get --tar": ["get", "pets", "--force", "--tar", link],
        "mount --log-file": ["mount", "--log-file", link, "pets", tmp_path / "mount"],
    }
    assert "another user may have planted" in dlcmd(*words[command], code=12).err
    assert ours.is_dir() or ours.read_bytes() == b"ours"
    assert not ours.is_dir() or not [*ours.iterdir()]
