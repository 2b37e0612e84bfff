"""`atomic_file` and `log_file`: whole or not at all; devices and fifos stay; planted links and
files (made by another user in a folder that others may write) are refused.
"""

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
from ..rows import each_row
from ..unprivileged_user import USER, needs_root


def write(path: Path, content: bytes, *, sync: bool = True) -> None:
    with atomic_file(path, sync=sync) as file:
        file.write(content)


@each_row("sync", [True, False])
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
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link"
    link.symlink_to("folder/file")
    for content in (b"1", b"2"):
        write(link, content)
        assert link.is_symlink()
        assert (tmp_path / "folder/file").read_bytes() == content
    assert len([*tmp_path.rglob("*")]) == 3


def test_a_fifo_stays_a_fifo(tmp_path: Path) -> None:
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
    with pytest.raises(UsageError, match="is a folder"):
        write(tmp_path, b"")
    with pytest.raises(FileNotFoundError) as caught:
        write(tmp_path / "none/file", b"")
    assert caught.value.filename == str(tmp_path / "none/file")


def append(path: Path, content: bytes) -> None:
    with log_file(path) as file:
        file.write(content)


WRITERS = {"whole": write, "log": append}


def made_shared(tmp_path: Path, mode: int = 0o777) -> Path:
    """Unlike /tmp it has no sticky bit, with which many kernels refuse to follow planted links
    themselves."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    return folder


def planted(path: Path) -> Path:
    os.chown(path, USER, USER, follow_symlinks=False)
    return path


def refuses(way: str, path: Path) -> bool:
    with pytest.raises(PermissionDenied, match="another user may have planted"):
        WRITERS[way](path, b"theirs")
    return True


@needs_root
@each_row("way", WRITERS)
@each_row("mode", [0o1777, 0o777, 0o775])
def test_a_planted_link_is_not_followed(tmp_path: Path, way: str, mode: int) -> None:
    """Nor is a folder link on the way that everybody may write, even if a link of our own leads
    there."""
    shared = made_shared(tmp_path, mode)
    (tmp_path / "private").mkdir()
    (tmp_path / "ours").write_bytes(b"ours")
    for target in ("ours", "new", "private"):
        (shared / target).symlink_to(tmp_path / target)
        planted(shared / target)
    (tmp_path / "link").symlink_to(shared / "private/file")
    on_the_way = ["private/file", "private/../private/file", "../link"]
    for path in ("ours", "new", *(on_the_way if mode & stat.S_IWOTH else [])):
        assert refuses(way, shared / path)
    assert (tmp_path / "ours").read_bytes() == b"ours"
    assert not (tmp_path / "new").exists()
    assert not [*(tmp_path / "private").iterdir()]


@needs_root
@each_row("way", WRITERS)
def test_other_links_are_followed(tmp_path: Path, way: str) -> None:
    shared = made_shared(tmp_path)
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
def test_a_log_is_not_written_to_a_planted_file(tmp_path: Path) -> None:
    """The owner of the file could read the log, and a hard link could lead to a file of ours."""
    shared = made_shared(tmp_path)
    (tmp_path / "ours").write_bytes(b"ours")
    os.link(tmp_path / "ours", shared / "linked")
    (shared / "theirs").touch()
    os.mkfifo(shared / "fifo")
    for name in ("theirs", "fifo"):
        planted(shared / name)
    for name in ("theirs", "linked", "fifo"):
        assert refuses("log", shared / name)
    assert (tmp_path / "ours").read_bytes() == b"ours"
    reader = os.open(shared / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    assert refuses("whole", shared / "fifo")
    assert os.read(reader, 10) == b""
    os.close(reader)


@needs_root
@each_row(
    ("verb", "words"),
    [
        ("save-meta", ["pets", "LINK"]),
        ("get", ["pets", "LINK"]),
        ("get", ["pets", "--force", "--tar", "LINK"]),
        ("mount", ["--log-file", "LINK", "pets", "mount"]),
    ],
)
def test_no_verb_follows_planted_links(
    dlcmd: Dlcmd, tmp_path: Path, verb: str, words: list[str]
) -> None:
    with connect("pets", dlcmd.store.as_uri(), create=True) as dataset:
        dataset.put(b"content", "cat")
    ours, link = tmp_path / "ours", made_shared(tmp_path) / "link"
    if is_folder := words == ["pets", "LINK"] and verb == "get":
        ours.mkdir()
    else:
        ours.write_bytes(b"ours")
    link.symlink_to(ours)
    planted(link)
    given = [str(link) if word == "LINK" else word for word in words]
    assert "another user may have planted" in dlcmd(verb, *given, code=12).err
    assert [*ours.iterdir()] == [] if is_folder else ours.read_bytes() == b"ours"
