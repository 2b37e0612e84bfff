"""`--session auto` takes the best session that works, and reports why it is not a better one."""

import json
import shutil
from pathlib import Path

import pytest

from diesel_fs.mounts import stats
from tests.mounts.conftest import mounting
from tests.mounts.observed import Program, log_of, with_our_modules
from tests.mounts.other_kernels import KERNEL
from tests.trees import write
from tests.unprivileged_user import as_user, needs_root, user_python

pytestmark = [pytest.mark.fuse, needs_root]

MOUNTED = """if True:
    import json, sys
    from pathlib import Path
    from diesel_fs.errors import DieselError
    from diesel_fs.mounts import stats
    from tests.mounts.conftest import mounting
    from tests.mounts.observed import log_of
    place, session = Path(sys.argv[1]), sys.argv[2]
    try:
        with mounting(place / "source", place / "mount", session) as mounted:
            assert (mounted.at / "file").read_bytes() == b"content"
            print(json.dumps([stats(mounted.at), log_of(mounted)]))
    except DieselError as error:
        print(json.dumps([{"session": None}, str(error)]))
"""

WITHOUT_CAPABILITY = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", "--"]
IN_USER_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount", "--"]


def mounted_as(place: Path, session: str, *by: str) -> tuple[dict[str, object], str]:
    """Mount by a program that `by` starts. Returns the session and log, or an empty session and the
    error."""
    write(place / "source", {"file": b"content"})
    words = [*with_our_modules(place), *by]
    with Program(MOUNTED, place, session, by=words, python=user_python()) as program:
        found, text = json.loads(program.first_line)
        assert program.end() == ""
    return found, text


def notes(found: dict[str, object]) -> str:
    values = found["session_notes"]
    assert isinstance(values, list)
    (value,) = values
    return str(value)


def test_the_best_session_that_works_is_taken(source: Path, tmp_path: Path) -> None:
    with mounting(source, tmp_path / "mount") as mounted:
        found = stats(mounted.at)
    assert found["session"] == "native"
    assert "session_notes" not in found


@pytest.mark.parametrize(
    ("kernel", "session", "note"),
    [
        ("no-erofs", "kernel", "no EROFS"),
        ("no-file-mounts no-loop-devices", "kernel", "loop devices are in use"),
        ("no-file-mounts", "native", "loop devices are used"),
    ],
)
def test_a_kernel_without_the_best_gets_the_next_best(
    kernel: str,
    session: str,
    note: str,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(KERNEL, kernel)
    with mounting(source, tmp_path / "mount") as mounted:
        found = stats(mounted.at)
        assert (mounted.at / "b").read_bytes() == b"beta"
        log = log_of(mounted)
    assert found["session"] == session
    assert note in notes(found)
    assert note in log
    assert "WARNING" not in log


@pytest.mark.usefixtures("device_for_all")
def test_an_ordinary_user_gets_the_kernel_session(open_place: Path) -> None:
    found, log = mounted_as(open_place, "auto", *as_user())
    assert found["session"] == "kernel"
    assert "it needs root" in notes(found)
    assert log.count("native") == 1
    assert "WARNING" not in log


def test_the_capability_decides_and_not_the_user(tmp_path: Path) -> None:
    """Root in a container has it only if the container was started with it."""
    found, error = mounted_as(tmp_path, "native", *WITHOUT_CAPABILITY)
    assert found["session"] is None
    assert "CAP_SYS_ADMIN" in error


@pytest.mark.alone  # the namespace keeps mounts that other tests unmount meanwhile
@pytest.mark.skipif(shutil.which("unshare") is None, reason="there is no unshare")
def test_root_of_a_user_namespace_gets_the_kernel_session(tmp_path: Path) -> None:
    """It has the capability, but the kernel lets it mount FUSE alone."""
    found, log = mounted_as(tmp_path, "auto", *IN_USER_NAMESPACE)
    assert found["session"] == "kernel", log
    assert "root of the machine" in notes(found)
