"""Files that users name: whole or not at all, and what is no file is never replaced by one."""

import os
import stat
import threading
from pathlib import Path

import pytest

from diesel_fs.errors import UsageError
from diesel_fs.whole_files import whole_file


def write(path: Path, content: bytes, *, sync: bool = True) -> None:
    with whole_file(path, sync=sync) as file:
        file.write(content)


@pytest.mark.parametrize("sync", [True, False])
def test_a_file_is_there_when_it_is_whole(tmp_path: Path, sync: bool) -> None:
    path = tmp_path / "file"
    write(path, b"1", sync=sync)
    before = path.open("rb")
    with whole_file(path, mode=0o640, sync=sync) as file:
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
