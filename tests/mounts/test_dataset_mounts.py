"""Which mounts show datasets, by the text of a mountinfo file, and which processes serve them."""

from contextlib import ExitStack

from diesel_fs.mounts.mountpoints.mountpoint import DatasetMount, dataset_mounts
from diesel_fs.mounts.mountpoints.processes import daemon_of
from diesel_fs.system.mountinfo import parse_mounts
from tests.mounts.observed import Program
from tests.rows import each_row

ROOT = "22 1 254:0 / / rw - ext4 /dev/vda rw"
TREE = "50 22 0:42 / /mnt/a ro,nosuid - erofs pets@7 ro,cache_strategy=readaround"
FUSE = "50 22 0:41 / /mnt/a ro - fuse.diesel pets@7 ro,user_id=0"
BOUND = "60 22 0:42 / /mnt/b ro - erofs pets@7 ro"
HIDDEN = "51 50 0:41 / /mnt/a/.diesel ro,nosuid - fuse.diesel pets@7 ro,user_id=0"


def found_in(*lines: str) -> dict[str, DatasetMount]:
    found = [
        {each.path: each for each in dataset_mounts(parse_mounts("\n".join(order).encode()))}
        for order in ([ROOT, *lines], [ROOT, *lines][::-1])
    ]
    assert found[0] == found[1]
    return found[0]


@each_row(
    ("lines", "path", "device", "is_native", "hidden_mount"),
    [
        ([FUSE], "/mnt/a", "0:41", False, None),
        ([TREE, HIDDEN], "/mnt/a", "0:41", True, "/mnt/a/.diesel"),
        ([TREE], "/mnt/a", "", True, None),
        ([TREE, HIDDEN, BOUND], "/mnt/b", "0:41", True, None),
    ],
    ids=["by FUSE", "native", "its hidden folder was unmounted", "a bind mount without it"],
)
def test_a_native_mount_is_a_tree_and_the_fuse_mount_on_its_hidden_folder(
    lines: list[str], path: str, device: str, is_native: bool, hidden_mount: str | None
) -> None:
    found = found_in(*lines)
    assert len(found) == (2 if BOUND in lines else 1)
    mount = found[path]
    assert (mount.device, mount.source, mount.is_native) == (device, "pets@7", is_native)
    assert (mount.hidden_mount and mount.hidden_mount.path) == hidden_mount
    assert mount.hidden_folder == "/mnt/a/.diesel"


def test_other_mounts_of_erofs_or_fuse_are_no_mounts_of_datasets() -> None:
    """An EROFS whose source is a path, other FUSE file systems."""
    assert not found_in("50 22 7:0 / /mnt/a ro - erofs /dev/loop0 ro")
    assert not found_in("50 22 0:42 / /mnt/a ro - erofs ./image ro")
    assert not found_in("50 22 0:42 / /mnt/a ro - fuse.sshfs pets@7 ro")
    inside = "52 50 0:43 / /mnt/a/folder ro - fuse.diesel cats@1 ro,user_id=0"
    assert set(found_in(TREE, HIDDEN, inside)) == {"/mnt/a", "/mnt/a/folder"}


MARKED = """if True:
    import sys
    from diesel_fs.mounts.mountpoints.processes import mark_as_daemon
    print(mark_as_daemon(sys.argv[1]), flush=True)
    sys.stdin.read()
"""


def test_the_daemon_of_a_mount_is_the_one_that_was_marked_last() -> None:
    """A device number may be in use again before the daemon of its earlier mount has ended."""
    device = "999999:7"  # no file system has such a number
    with ExitStack() as stack:
        for _ in range(5):
            daemon = stack.enter_context(Program(MARKED, device))
            assert daemon_of(device) == daemon.pid
    assert daemon_of(device) is None
