"""Mounts that follow, compared with random trees: after each switch the mount is the tree."""

import mmap
import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from diesel_fs.ingest import FolderSource, PutOptions, put
from diesel_fs.mounts import MountRequest
from diesel_fs.repository.local import LocalRepository
from tests.examples import examples
from tests.mounts.observed import mounted
from tests.mounts.versions.followed_dataset import POLL_INTERVAL_S, FollowedMount
from tests.trees import facts

pytestmark = pytest.mark.fuse

Entry = tuple[str, bytes, int, int]
"""Kind, content or target, mode, time in s."""

names = st.sampled_from(["a", "b", "c", "\udcff", "line\n"])
tree_paths = st.lists(names, min_size=1, max_size=3).map("/".join)
entries = st.one_of(
    st.tuples(st.just("file"), st.sampled_from([b"", b"x", b"y" * 5000, b"z" * 70_000]),
              st.sampled_from([0o644, 0o600]), st.integers(1, 3)),
    st.tuples(st.just("folder"), st.just(b""), st.sampled_from([0o755, 0o700]), st.integers(1, 3)),
    st.tuples(st.just("link"), st.sampled_from([b"a", b"nowhere"]), st.just(0), st.integers(1, 3)),
)  # fmt: skip
changes = st.dictionaries(tree_paths, st.one_of(st.none(), entries), max_size=5)


def changed_tree(tree: dict[str, Entry], change: dict[str, Entry | None]) -> dict[str, Entry]:
    """A tree after these changes; None removes a path. An entry put below a file replaces the
    file."""
    tree = dict(tree)
    for path, entry in change.items():
        for known in tuple(tree):
            is_below = known == path or known.startswith(path + "/")
            is_above = path.startswith(known + "/") and tree[known][0] != "folder"
            if (is_below and (entry is None or entry[0] != "folder")) or is_above:
                del tree[known]
        if entry is not None:
            tree[path] = entry
    return tree


def write_tree(top: Path, tree: dict[str, Entry]) -> None:
    shutil.rmtree(top, ignore_errors=True)
    top.mkdir()
    for path in sorted(tree):
        kind, content, _, _ = tree[path]
        (top / path).parent.mkdir(parents=True, exist_ok=True)
        if kind == "folder":
            (top / path).mkdir(exist_ok=True)
        elif kind == "link":
            (top / path).symlink_to(os.fsdecode(content))
        else:
            (top / path).write_bytes(content)
    for path in sorted([".", *(os.path.relpath(os.path.join(folder, name), top)
                               for folder, inner, files in os.walk(top)
                               for name in inner + files)], reverse=True):  # fmt: skip
        kind, _, mode, time_s = tree.get(path, ("folder", b"", 0o755, 9))
        if kind != "link":
            os.chmod(top / path, mode)
        os.utime(top / path, (time_s, time_s), follow_symlinks=False)


@dataclass
class OpenFile:
    descriptor: int
    content: bytes
    mapped: "mmap.mmap | None"

    @classmethod
    def of(cls, path: bytes) -> "OpenFile":
        descriptor = os.open(path, os.O_RDONLY)
        size = os.fstat(descriptor).st_size
        is_mapped = size > 0 and len(path) % 2 == 0  # a mapped file keeps its pages
        mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) if is_mapped else None
        with open(path, "rb") as file:
            return cls(descriptor, file.read(), mapped)

    def check(self) -> None:
        """Read the file again from the mount, not from kept pages."""
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(self.descriptor, 100_000, 0) == self.content
        assert os.fstat(self.descriptor).st_size == len(self.content)
        assert self.mapped is None or self.mapped[:] == self.content

    def close(self) -> None:
        if self.mapped is not None:
            self.mapped.close()
        os.close(self.descriptor)


@pytest.mark.deep
@examples(6, suppress=(HealthCheck.function_scoped_fixture,))
@given(steps=st.lists(changes, min_size=3, max_size=6))
def test_after_each_switch_the_mount_is_the_tree(
    session: str, tmp_path_factory: pytest.TempPathFactory, steps: list[dict[str, Entry | None]]
) -> None:
    base = tmp_path_factory.mktemp("model")
    (at := base / "mount").mkdir()
    url, source = (base / "store").as_uri(), base / "source"
    request = MountRequest(
        url,
        "ds",
        str(at),
        session=session,
        allow_other=True,  # otherwise the root folder of a native mount is closed to others
        follow=True,
        follow_interval_s=POLL_INTERVAL_S,
        log_file=str(base / "log"),
    )
    followed = FollowedMount(url, at, base / "log", request)
    tree: dict[str, Entry] = {"always": ("file", b"always" * 1000, 0o644, 1)}
    options = PutOptions(jobs=1, delete=True)
    held: list[OpenFile] = []
    last: dict[bytes, tuple[object, ...]] = {}
    nodes: dict[bytes, int] = {}
    used: set[int] = set()
    with ExitStack() as stack:
        for number, change in enumerate([{}, *steps]):
            tree = changed_tree(tree, change)
            write_tree(source, tree)
            with LocalRepository.open(url, create=True) as repository:
                put(repository, "ds", FolderSource(source), options=options)
                version = repository.view("ds").version
            if not number:
                stack.enter_context(mounted(request))
            followed.wait_for(version)
            found = facts(at)
            assert found == facts(source)
            top = os.fsencode(at)
            now = {path: os.lstat(os.path.join(top, path)).st_ino for path in found}
            for path, node in now.items():
                is_folder = found[path][0] == "folder"
                same = last.get(path) == found[path] or (
                    is_folder and path in last and last[path][0] == "folder"
                )
                if not followed.is_native:
                    assert (node == nodes[path]) if same else (node not in used)
            assert len(set(now.values())) == len(now)
            used |= set(now.values())
            last, nodes = found, now
            for each in held:
                each.check()
            held += [
                OpenFile.of(os.path.join(top, path)) for path in found if found[path][0] == "file"
            ]
        for each in held:
            each.close()
        followed.wait_for_retirement()
