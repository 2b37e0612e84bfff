"""An image shows its snapshot: each name, attribute and byte, as another reader finds them."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.errors import FormatError
from diesel_fs.format.entries import Kind
from diesel_fs.format.image import Image, ImageTooLarge, Shown
from tests.examples import examples
from tests.format.snapshot.oracle import OwnEntry, ShownEntry, State, shown
from tests.rows import each_row

from .erofs import BLOCK, Erofs
from .trees import (
    CHAIN,
    NAMES,
    ImageContentFile,
    Seen,
    differences,
    everything,
    file,
    image_of,
    in_root,
    link,
    page_of,
    seen_of,
    snapshot_of,
    snapshot_of_large_file,
)

ME = Shown(uid=1000, gid=1001, umask=0o022)


def open_tree(image: Image, entries: Mapping[bytes, ShownEntry], *, hidden: bool) -> Erofs:
    content = ImageContentFile(image, entries.values())
    root = image.root_folder(hidden=hidden)
    assert len(root) == len(image.root_folder(hidden=not hidden))

    def read_root(offset: int, length: int) -> bytes:
        return root[offset : offset + length]

    return Erofs(bytes(image.buffer[: image.tree_bytes]), content.read, read_root)


def check(state: State, how: Shown = ME, *, version: int = 1) -> Image:
    entries = shown(state)
    image = image_of(snapshot_of(state, version=version), how)
    assert (image.entry_count, image.version, image.shown) == (len(entries), version, how)
    check_image(image, entries, how)
    return image


def check_image(image: Image, entries: Mapping[bytes, ShownEntry], how: Shown) -> None:
    for hidden in (False, True):
        tree = open_tree(image, entries, hidden=hidden)
        found: dict[bytes, Seen] = {}
        for path, inode in tree.walk():
            is_folder, target = inode.mode >> 12 == 0o04, b""
            if inode.mode >> 12 == 0o12:
                target = tree.read(inode)
            elif not is_folder and inode.size:
                entry = entries[path]
                for page in {0, 1, (inode.size - 1) // BLOCK}:
                    if page * BLOCK < inode.size:
                        whole = tree.whole_page(inode, page)
                        assert whole == page_of(entry, page), (path, page)
            size = -1 if is_folder else inode.size
            assert inode.links == 1
            found[path] = Seen(inode.mode, inode.uid, inode.gid, inode.mtime_ns, size, target)
        assert differences(found, seen_of(entries, how, hidden=hidden)) == []
        assert tree.inodes == len(entries) + 1
        # `.diesel` has an inode even if no list names it: a mount covers it with that.
        root = tree.inode(tree.root)
        assert (tree.lookup(root, b".diesel") is None) == hidden


def test_the_dataset_with_all_oddities() -> None:
    check(everything(), Shown(uid=2**32 - 2, gid=0, umask=0o077))
    assert check({}).order.tolist() == []


def test_a_private_tree_lets_only_its_owner_in() -> None:
    image = check({b"": OwnEntry(Kind.FOLDER, 0o755), b"a": file(3, 96, 5)}, Shown(5, 6, 0o002, 7))
    tree = open_tree(image, shown({b"a": file(3, 96, 5)}), hidden=True)
    root = tree.inode(tree.root)
    assert (root.mode, root.uid, root.gid) == (0o040700, 7, 6)


@each_row("count", range(24))
def test_diesel_shares_its_block_with_another_name(count: int) -> None:
    """Names before `.diesel` fill the first block of the root folder except for 0 to 23 bytes."""
    filling = BLOCK - (12 + 1) - (12 + 2) - count
    lengths = [255] * (filling // 267)
    rest = filling - 267 * len(lengths)
    if rest > 12:
        lengths.append(rest - 12)
    else:  # too short for a name: the previous one gets shorter
        lengths[-1] -= 20
        lengths.append(rest + 20 - 12)
    names = [b"!%03d" % number + b"-" * (length - 4) for number, length in enumerate(lengths)]
    assert sum(12 + len(name) for name in names) == filling
    check(in_root(names))
    check(in_root([*names, b".diesel-"]))
    check(in_root([*names, b"z" * 255]))


def test_a_root_folder_of_many_blocks() -> None:
    check(in_root([b".%d" % number for number in range(3000)] + [b"+%d" % n for n in range(3000)]))


@pytest.mark.deep
def test_a_folder_of_100_000_entries_and_one_within_another() -> None:
    state = {b"wide/%d" % number: OwnEntry(Kind.FILE) for number in range(100_000)}
    state[b"/".join([b"d"] * 1000)] = file(3, 96, 1)
    check(state)


def test_an_image_does_not_depend_on_the_size_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real batches are larger than any test's dataset."""
    state = everything()
    for number in range(3000):
        state[b"spread/%d" % number] = file(20 + number % 37, 96 + number, 5000)
        state[b"links/%d/%d" % (number % 5, number)] = link(b"t" * (number % 300 + 1))
    snapshot = snapshot_of(state)
    earlier = image_of(snapshot_of({**state, b"spread/7": file(19, 96, 5)}), ME)
    wanted = [bytes(image_of(snapshot, ME, before).buffer) for before in (CHAIN, earlier)]
    for items, blocks, contents in ((400, 1, 1), (401, 2, 7), (1023, 5, 100)):
        monkeypatch.setattr("diesel_fs.format.image.tree._BATCH", items)
        monkeypatch.setattr("diesel_fs.format.image.tree._BATCH_BLOCKS", blocks)
        monkeypatch.setattr("diesel_fs.format.image.file._BATCH", contents)
        monkeypatch.setattr("diesel_fs.format.image.addresses._BATCH", contents)
        made = [bytes(image_of(snapshot, ME, before).buffer) for before in (CHAIN, earlier)]
        assert made == wanted


def test_a_file_of_5_GB() -> None:
    """Its addresses follow one another from a multiple of 64 KiB on."""
    state = {b"large": file(3, 96, 5 * 10**9 + 1), b"small": file(3, 20_000, 1)}
    image = image_of(snapshot_of(state), ME)
    first = dict(zip(shown(state), image.first_block.tolist(), strict=True))
    assert first[b"large"] % 16 == 0
    assert first[b"small"] not in range(first[b"large"], first[b"large"] + 1_220_704)
    root = image.root_folder(hidden=True)
    tree = Erofs(
        bytes(image.buffer[: image.tree_bytes]),
        lambda at, _: at.to_bytes(8) * 512,
        lambda at, length: root[at : at + length],
    )
    item = tree.lookup(tree.inode(tree.root), b"large")
    assert item is not None
    inode = tree.inode(item.number)
    assert inode.size == 5 * 10**9 + 1
    at = (first[b"large"] + 1_220_703) * BLOCK
    assert tree.read_page(inode, 1_220_703) == (at.to_bytes(8) * 512)[: inode.size % BLOCK]


def test_df_shows_the_blocks_that_are_needed() -> None:
    image = image_of(snapshot_of({b"a": file(3, 96, 9000), b"b": file(3, 97, 1)}), ME)
    tree = open_tree(image, shown({b"a": file(3, 96, 9000), b"b": file(3, 97, 1)}), hidden=True)
    (content_at, content_end, _), (root_at, root_end, _) = tree.ranges
    assert (root_at, root_end) == (tree.blocks, content_at)
    assert content_end - content_at == 1 + 3 + 1
    assert tree.blocks * BLOCK == image.tree_bytes


def test_file_systems_of_two_versions_have_two_names() -> None:
    """File handles of an NFS server name the file system by its UUID."""
    state = {b"a": file(3, 96, 9)}
    images = [image_of(snapshot_of(state, version=version), ME) for version in (1, 2)]
    one, other = (bytes(image.buffer[1024 + 48 : 1024 + 64]) for image in images)
    assert one != other


names = st.one_of(
    st.sampled_from(NAMES),
    st.binary(min_size=1, max_size=255),
    st.binary(min_size=1, max_size=3),
    st.integers(1, 255).map(lambda length: b"n" * length),
).map(lambda name: name.translate(bytes.maketrans(b"/\0", b"!!")))
paths = st.lists(names.filter(lambda name: name not in (b".", b"..")), min_size=1, max_size=4)
times = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-3, 3))
sizes = st.one_of(st.integers(0, 3), st.sampled_from([4095, 4096, 4097, 70_000]))
kinds = st.sampled_from(["file", "link", "folder"])
targets = st.one_of(
    st.binary(min_size=1, max_size=99), st.integers(1, 4095).map(lambda n: b"t" * n)
)
entries = st.lists(
    st.tuples(paths, kinds, st.integers(0, 0o777), times, sizes, targets), max_size=40
)
views = st.builds(
    Shown,
    st.integers(0, 2**32 - 2),
    st.integers(0, 2**32 - 2),
    st.integers(0, 0o777),
    st.integers(-1, 2**32 - 2),
)
"""The user 2**32 - 1 is none: the kernel shows another instead."""


@st.composite
def drawn_trees(draw: st.DrawFn) -> tuple[State, Shown]:
    state: dict[bytes, OwnEntry] = {}
    for number, (path, kind, mode, mtime_ns, size, target) in enumerate(draw(entries)):
        if path[0] == b".diesel":
            path = [b"x", *path]
        if kind == "file":
            own = file(3 + number % 5, 96 + number * 99, size, mode, mtime_ns)
        elif kind == "link":
            own = link(target.replace(b"\0", b"0"), mtime_ns)
        else:
            own = OwnEntry(Kind.FOLDER, mode, mtime_ns)
        state[b"/".join(path)] = own
    return state, draw(views)


@examples(200)
@given(drawn_trees())
def test_an_image_of_any_tree_shows_it(drawn: tuple[State, Shown]) -> None:
    check(*drawn)


# What cannot be shown


@each_row("own", [file(3, 96, 1), OwnEntry(Kind.FOLDER), link(b"x")])
def test_a_dataset_with_diesel_at_its_root_is_refused(own: OwnEntry) -> None:
    with pytest.raises(FormatError, match=r"\.diesel"):
        image_of(snapshot_of({b".diesel": own}), ME)
    with pytest.raises(FormatError, match=r"\.diesel"):
        image_of(snapshot_of({b".diesel/x": own}), ME)


def test_a_link_that_the_kernel_would_cut_off_is_refused() -> None:
    with pytest.raises(FormatError, match="target"):
        image_of(snapshot_of({b"a": link(b"t" * 4096)}), ME)


def no_device(offset: int, length: int) -> bytes:
    raise AssertionError("nothing is read")


def test_a_dataset_may_need_all_addresses_but_no_more() -> None:
    """Addresses of blocks have 32 bits, and the last of them would mean a hole."""

    def blocks_in_use(file_blocks: int) -> int:
        image = image_of(snapshot_of_large_file(file_blocks * BLOCK), ME)
        tree = Erofs(bytes(image.buffer[: image.tree_bytes]), no_device, no_device)
        return max(end for _, end, _ in tree.ranges)

    most = 2**32 - 1
    fitting = most - 1000
    fitting += most - blocks_in_use(fitting)
    assert blocks_in_use(fitting) == most
    for too_many in (fitting + 1, fitting + 16, 2**32, 2**33):
        with pytest.raises(ImageTooLarge, match="16 TiB"):
            blocks_in_use(too_many)
