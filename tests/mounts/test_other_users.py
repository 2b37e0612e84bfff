"""The access of other users to a mount: none, or with --allow-other as the modes allow.

`open_by_handle_at` is how an NFS server opens files: by a number that leads past all folders.
"""

import ctypes
import errno
import json
import os
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from diesel_fs.mounts.tree.attributes import HIDDEN_ROOT
from diesel_fs.mounts.tree.content_file import CONTENT_BYTES, private_name
from tests.mounts.conftest import mounting
from tests.mounts.observed import bound, holding
from tests.unprivileged_user import USER, as_user, needs_root, user_python

pytestmark = [pytest.mark.fuse, needs_root, pytest.mark.only_session("native", "kernel")]

libc = ctypes.CDLL(None, use_errno=True)

TRY = """if True:
    import ctypes, errno, json, os, sys
    def by_handle(folder, text):
        room = ctypes.create_string_buffer(bytes.fromhex(text))
        mount = os.open(folder, os.O_RDONLY)
        descriptor = ctypes.CDLL(None, use_errno=True).open_by_handle_at(mount, room, os.O_RDONLY)
        if descriptor < 0:
            raise OSError(ctypes.get_errno(), "open_by_handle_at")
        return os.read(descriptor, 100)
    def read(path):
        with open(path, "rb", buffering=0) as file:
            return file.read(100)
    found = []
    for name, *arguments in json.loads(sys.argv[1]):
        calls = {"stat": os.stat, "list": os.listdir, "read": read, "by_handle": by_handle}
        try:
            calls[name](*arguments)
            found.append("")
        except OSError as error:
            found.append(errno.errorcode[error.errno])
    print(json.dumps(found))
"""

Attempt = tuple[str, ...]


def tried_by_another_user(*attempts: Attempt, inside: Path | None = None) -> list[str]:
    """Return the errno of each attempt of a user without rights; empty for success. The process
    begins `inside` a folder, as root."""
    paths = [[name, *map(str, rest)] for name, *rest in attempts]
    command = [*as_user(), user_python(), "-I", "-S", "-c", TRY, json.dumps(paths)]
    done = subprocess.run(command, check=True, capture_output=True, cwd=inside or "/")
    found = json.loads(done.stdout)
    assert isinstance(found, list)
    return found


def handle_of(path: Path) -> bytes:
    room = ctypes.create_string_buffer(bytes([128, 0, 0, 0]), 136)
    mount_id = ctypes.c_int()
    if libc.name_to_handle_at(-100, bytes(path), room, ctypes.byref(mount_id), 0) < 0:
        raise OSError(ctypes.get_errno(), "name_to_handle_at")
    return room.raw


@pytest.fixture
def source(open_place: Path) -> Path:
    folder = open_place / "source"
    (folder / "folder").mkdir(parents=True)
    (folder / "folder" / "public").write_bytes(b"public")
    (folder / "folder" / "shared").write_bytes(b"shared")
    (folder / "folder" / "shared").chmod(0o640)
    return folder


def test_other_users_get_nothing_without_allow_other(
    source: Path, open_place: Path, session: str
) -> None:
    with (
        mounting(source, open_place / "m", session) as mounted,
        bound(mounted.at, open_place / "bound") as other,
        holding(f"os.chdir('{mounted.at}/folder')") as inside,
    ):
        attempts = []
        for at in (mounted.at, other):
            attempts += [("list", at), ("stat", at / "folder"), ("list", at / "folder")]
            attempts += [("read", at / "folder" / "public"), ("stat", at / "no such name")]
            attempts += [("stat", at / ".diesel"), ("read", at / ".diesel" / "stats")]
        folder = Path(f"/proc/{inside.pid}/cwd")
        attempts += [("list", folder), ("read", folder / "public")]
        found = tried_by_another_user(*[tuple(map(str, each)) for each in attempts])
        assert found == ["EACCES"] * len(found)


def test_a_file_handle_is_for_root_alone(source: Path, open_place: Path, session: str) -> None:
    with mounting(source, open_place / "m", session, allow_other=True) as mounted:
        handle = handle_of(mounted.at / "folder" / "public").hex()
        assert tried_by_another_user(("by_handle", str(mounted.at), handle)) == ["EPERM"]


def test_modes_decide_inside_a_native_mount(source: Path, open_place: Path, session: str) -> None:
    """FUSE refuses other users everywhere. A native mount is closed at its root folder alone: root
    must not bind a folder of it elsewhere, or change the user of a process inside it."""
    inside = ["", "EACCES"] if session == "native" else ["EACCES", "EACCES"]
    with mounting(source, open_place / "m", session) as mounted:
        names = ("public", "shared")
        with bound(mounted.at / "folder", open_place / "bound") as other:
            assert tried_by_another_user(*(("read", str(other / n)) for n in names)) == inside
        found = tried_by_another_user(*(("read", n) for n in names), inside=mounted.at / "folder")
        assert found == inside


OPTIONS: list[tuple[dict[str, object], list[str]]] = [
    ({}, ["", "", "EACCES"]),
    ({"uid": USER}, ["", "", ""]),
    ({"gid": USER}, ["", "", ""]),
    ({"umask": 0o027}, ["EACCES", "EACCES", "EACCES"]),
    ({"uid": USER, "umask": 0o777}, ["EACCES", "EACCES", "EACCES"]),
]


@pytest.mark.parametrize(("options", "expected"), OPTIONS, ids=repr)
def test_modes_owner_and_umask_decide_with_allow_other(
    source: Path, open_place: Path, session: str, options: dict[str, object], expected: list[str]
) -> None:
    with mounting(source, open_place / "m", session, allow_other=True, **options) as mounted:
        attempts = [("list", mounted.at), ("read", mounted.at / "folder" / "public")]
        attempts.append(("read", mounted.at / "folder" / "shared"))
        assert tried_by_another_user(*[tuple(map(str, each)) for each in attempts]) == expected


@pytest.mark.only_session("native")
@pytest.mark.parametrize("owner", [0, USER])
def test_the_content_file_is_roots_alone_and_listed_nowhere(
    source: Path, open_place: Path, session: str, owner: int
) -> None:
    """This holds with --allow-other, too, and if the other user owns the dataset's entries."""
    (source / "folder" / "closed").write_bytes(b"closed")
    (source / "folder" / "closed").chmod(0)
    with mounting(source, open_place / "m", session, allow_other=True, uid=owner) as mounted:
        hidden = mounted.at / ".diesel"
        names = {private_name(HIDDEN_ROOT - number) for number in range(1, 20)}
        assert not names & set(os.listdir(hidden))
        found = [hidden / name for name in names if os.path.exists(hidden / name)]
        assert CONTENT_BYTES in [path.stat().st_size for path in found]
        assert {(path.stat().st_uid, path.stat().st_mode) for path in found} == {(0, 0o100400)}
        closed = [*found, mounted.at / "folder" / "closed"]
        attempts = [("read", str(path)) for path in [*closed, hidden / "stats"]]
        assert tried_by_another_user(*attempts) == ["EACCES"] * len(closed) + [""]


@pytest.mark.only_session("native")
def test_file_handles_of_root_lead_to_files(source: Path, open_place: Path, session: str) -> None:
    """An NFS server keeps them. They also work for folders that the kernel has forgotten since."""
    with ExitStack() as held:
        mounted = held.enter_context(mounting(source, open_place / "m", session))
        handles = {path: handle_of(path) for path in mounted.at.rglob("*") if not path.is_symlink()}
        root = os.open(mounted.at, os.O_RDONLY | os.O_DIRECTORY)
        held.callback(os.close, root)
        for path, handle in handles.items():
            room = ctypes.create_string_buffer(handle)
            descriptor = libc.open_by_handle_at(root, room, os.O_RDONLY)
            assert descriptor >= 0, errno.errorcode[ctypes.get_errno()]
            try:
                assert os.fstat(descriptor).st_ino == path.stat().st_ino
                if path.is_file():
                    assert os.read(descriptor, 100) == path.read_bytes()
                else:
                    assert sorted(os.listdir(descriptor)) == sorted(os.listdir(path))
            finally:
                os.close(descriptor)
