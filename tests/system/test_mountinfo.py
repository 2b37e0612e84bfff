"""Which file system is mounted at a path, by the text of a mountinfo file."""

from pathlib import Path

from diesel_fs.system.mountinfo import file_system_of, parse_mounts, topmost_at

STACKED = rb"""22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
40 61 0:50 / /mnt ro,nosuid shared:1 - erofs pets@7 ro,user_xattr
61 22 0:51 / /mnt ro,nosuid - erofs pets@8 ro,user_xattr
70 22 0:52 /sub /a\040b rw - tmpfs none rw,size=4k
"""


def test_each_line_is_an_entry() -> None:
    last = list(parse_mounts(STACKED))[-1]
    assert (last.mount_id, last.parent_id, last.device) == (70, 22, "0:52")
    assert (last.path, last.kind, last.source) == ("/a b", "tmpfs", "none")
    assert last.options == {"rw", "size=4k"}


def test_the_topmost_mount_of_a_path_has_no_other_mounted_in_it() -> None:
    """Even if it was made before the mount beneath it."""
    entries = list(parse_mounts(STACKED))
    for ordered in (entries, entries[::-1]):
        found = topmost_at("/mnt", ordered)
        assert found is not None
        assert found.source == "pets@7"
        assert topmost_at("/", ordered) == entries[0]
        assert topmost_at("/other", ordered) is None


def test_the_file_system_of_a_path_is_that_of_the_topmost_mount() -> None:
    assert file_system_of(Path("/mnt/x"), STACKED).options == {"ro", "user_xattr"}
    assert file_system_of(Path("/a b"), STACKED).kind == "tmpfs"
    assert file_system_of(Path("/else"), STACKED).kind == "ext4"
