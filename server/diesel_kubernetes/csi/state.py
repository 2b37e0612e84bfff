"""The plugin's folder on the node (`--state`): where mounts lie, the node's key, and locks.

`VOLUMES.md` lists its files. A mount's name is `KEY-N`: the key of its volumes (`Volume.key`) and a
number. Locks are flock(2), so the kernel frees a lock when all processes that hold it have ended,
even if they were killed. Any thread.
"""

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from diesel_fs.errors import BusyError, PermissionDenied
from diesel_fs.settings import private_folder
from diesel_fs.system.atomic_file import atomic_file

from .volumes import KEY_CHARS

NODE_KEY_BYTES = 32

_NAME = re.compile(rf"([0-9a-f]{{{KEY_CHARS}}})-([1-9]\d{{0,8}})", re.ASCII)


def key_of(name: str) -> str:
    return name.partition("-")[0]


class StateFolder:
    """It belongs to this plugin until `close`."""

    def __init__(self, path: Path) -> None:
        """Locks the folder, and makes missing parts of it. Raises BusyError if another plugin has
        locked it, and PermissionDenied."""
        # The kernel lists mounts by their real paths
        self.path = private_folder(Path(os.path.realpath(path)))
        self.mounts = private_folder(self.path / "mounts")
        self._locks = private_folder(self.path / "locks")
        self.cache = private_folder(self.path / "cache")
        self._lock = _open_lock(self.path / "plugin.lock")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise BusyError(
                f"another diesel-csi runs with the state folder {self.path}",
                advice="end it, or name another folder by --state",
            ) from None
        self.node_key = self._load_node_key()

    def close(self) -> None:
        os.close(self._lock)

    def check(self) -> None:
        """Raises PermissionDenied if the folder is not writable."""
        probe = self.path / ".probe"
        try:
            with atomic_file(probe, sync=False) as file:
                file.write(b"x")
            probe.unlink()
        except OSError as error:
            raise PermissionDenied(f"cannot write to {self.path}: {error.strerror}") from error

    def folder(self, name: str) -> Path:
        return self.mounts / name

    def root(self, name: str) -> str:
        return str(self.mounts / name / "root")

    def run_folder(self, name: str) -> Path:
        return self.mounts / name / "run"

    def names(self, key: str = "") -> list[str]:
        """Sorts by key and number."""
        found = [name for name in os.listdir(self.mounts) if _NAME.fullmatch(name)]
        wanted = [name for name in found if not key or key_of(name) == key]
        return sorted(wanted, key=lambda name: (key_of(name), int(name.partition("-")[2])))

    def new_name(self, key: str) -> str:
        last = self.names(key)[-1:]
        return f"{key}-{int(last[0].partition('-')[2]) + 1 if last else 1}"

    def make_folder(self, name: str, namespace: str) -> None:
        """`namespace` is that of the mount's pods ("": not known). Raises PermissionDenied."""
        folder = self.folder(name)
        for each in (folder, folder / "root", self.run_folder(name)):
            private_folder(each)
        with suppress(OSError):  # reports of the node then leave this mount out
            (folder / "namespace").write_text(namespace)

    def namespace(self, name: str) -> str | None:
        """Returns "" if kubelet named no namespace, None if it was not stored."""
        with suppress(OSError, UnicodeDecodeError):
            return (self.folder(name) / "namespace").read_text()
        return None

    def remove_folder(self, name: str) -> None:
        """Raises OSError if something is still mounted there."""
        folder = self.folder(name)
        with suppress(FileNotFoundError):
            os.rmdir(folder / "root")
        shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def key_lock(self, key: str, *, wait: bool = True) -> Iterator[int]:
        """Yields the lock's descriptor. A program that inherits it holds the lock, too. Without
        `wait`, raises BlockingIOError if the lock is taken."""
        path = self._locks / key
        while True:
            descriptor = _open_lock(path)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                with suppress(FileNotFoundError):
                    if path.stat().st_ino == os.fstat(descriptor).st_ino:
                        break
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
        try:
            yield descriptor
        finally:
            if not self.names(key):
                path.unlink(missing_ok=True)
            os.close(descriptor)

    def _load_node_key(self) -> bytes:
        """The random key for `Volume.key`, made at the first start."""
        path = self.path / "node.key"
        with suppress(FileNotFoundError):
            found = path.read_bytes()
            if len(found) == NODE_KEY_BYTES:
                return found
        made = secrets.token_bytes(NODE_KEY_BYTES)
        with atomic_file(path) as file:
            file.write(made)
        return made


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
