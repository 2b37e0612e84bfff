"""Files that users name: whole or not at all, and what is no file is never replaced by one."""

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
def test_a_file_is_there_when_it_is_whole(tmp_path: Path, sync: bool) -> None:
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
    """Where it leads nowhere the file is made there."""
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link"
    link.symlink_to("folder/file")
    for content in (b"1", b"2"):
        write(link, content)
        assert link.is_symlink()
        assert (tmp_path / "folder/file").read_bytes() == content
    assert len([*tmp_path.rglob("*")]) == 3


def test_a_fifo_stays_one(tmp_path: Path) -> None:
    """And a link to one."""
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
def test_a_device_stays_one(tmp_path: Path) -> None:
    device = tmp_path / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        device.open("rb").close()
    except OSError as error:
        pytest.skip(f"no device can be made here: {error}")
    write(device, b"words")
    assert stat.S_ISCHR(device.lstat().st_mode)
    assert [*tmp_path.iterdir()] == [device]


def test_what_is_open_without_a_name_is_written_to(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        file.write(b"longer than that")
        file.flush()
        (tmp_path / "file").unlink()
        write(Path(f"/proc/self/fd/{file.fileno()}"), b"words")
        file.seek(0)
        assert file.read() == b"words"
    assert [*tmp_path.iterdir()] == []


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        write(tmp_path, b"")
    missing = tmp_path / "none/file"
    with pytest.raises(FileNotFoundError) as caught:
        write(missing, b"")
    assert caught.value.filename == str(missing)


# What somebody else has planted


def append(path: Path, content: bytes) -> None:
    with log_file(path) as file:
        file.write(content)


WRITERS = {"whole": write, "log": append}


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder where everybody may make something; in one like /tmp, whose files are their owners'
    to remove, many a kernel refuses by itself what is refused here."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def planted(path: Path) -> Path:
    """What another user has made there."""
    os.chown(path, USER, USER, follow_symlinks=False)
    return path


@needs_root
@pytest.mark.parametrize("way", WRITERS)
@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o775])
def test_a_link_that_another_user_has_planted_is_not_followed(
    tmp_path: Path, shared: Path, way: str, mode: int
) -> None:
    """To a file of ours, and to none that is there yet."""
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
def test_a_link_on_the_way_that_another_user_has_planted_is_not_followed(
    tmp_path: Path, shared: Path, way: str
) -> None:
    """Also where a link of ours leads to it."""
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
def test_links_that_nobody_else_has_made_are_followed(
    tmp_path: Path, shared: Path, way: str
) -> None:
    (shared / "ours").symlink_to(tmp_path / "file")
    WRITERS[way](shared / "ours", b"1")
    assert (tmp_path / "file").read_bytes() == b"1"
    private = tmp_path / "private"
    private.mkdir(mode=0o755)
    (private / "link").symlink_to(tmp_path / "other")
    planted(private / "link")  # somebody has made it who may not write there any more
    WRITERS[way](private / "link", b"2")
    assert (tmp_path / "other").read_bytes() == b"2"


@needs_root
def test_a_log_is_no_file_that_another_user_has_planted(tmp_path: Path, shared: Path) -> None:
    """Who owns it reads it; and another name of a file of ours would have that written to."""
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
def test_nothing_is_written_into_a_fifo_that_another_user_has_planted(shared: Path) -> None:
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
    """Exit 12, and what the link leads to is as it was."""
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
