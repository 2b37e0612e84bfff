"""In a chain of images a content keeps its address, and no address is given to two contents.

A model test: random versions of a dataset, beside a dict of all blocks ever given.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.errors import UsageError
from diesel_fs.format.image import Image, Shown
from tests.examples import examples
from tests.format.snapshot.oracle import OwnEntry, shown

from .trees import CHAIN, EXTENT_BYTES, file, image_of, snapshot_of

BLOCK = 4096
ME = Shown(uid=1, gid=2)
Origin = tuple[int, int, int]
"""Chunk, offset, size."""


@dataclass
class Chain:
    owner: dict[int, Origin] = field(default_factory=dict)
    """The content of each block that was ever given."""
    before: dict[Origin, int] = field(default_factory=dict)
    """Addresses in the previous image."""
    image: Image | None = None

    def follow(self, state: dict[bytes, OwnEntry], how: Shown = ME) -> Image:
        number = self.image.sequence + 1 if self.image else 1
        snapshot = snapshot_of(state, version=number)
        image = image_of(snapshot, how, self.image or CHAIN)
        assert (image.chain, image.sequence) == (CHAIN, number)
        now: dict[Origin, int] = {}
        for (path, entry), first in zip(
            shown(state).items(), image.first_block.tolist(), strict=True
        ):
            if not entry.parts:
                assert first == 0, path
                continue
            origin = entry.parts[0].chunk, entry.parts[0].offset, entry.size
            assert first > 0
            now[origin] = first
            blocks = range(first, first + -(-entry.size // BLOCK))
            if origin in self.before:
                assert first == self.before[origin]
            else:
                assert not any(block in self.owner for block in blocks)
                assert len(entry.parts) == 1 or first % 16 == 0
            self.owner.update(dict.fromkeys(blocks, origin))
        assert all(self.owner[first] == origin for origin, first in now.items())
        self.check_order(image, now)
        self.check_new_chunks(now)
        self.before, self.image = now, image
        return image

    def check_order(self, image: Image, now: dict[Origin, int]) -> None:
        assert image.end_block > max(self.owner, default=0)
        assert image.end_block >= (self.image.end_block if self.image else 1)
        assert image.start_blocks.tolist() == sorted(now.values())
        assert image.first_block[image.order].tolist() == image.start_blocks.tolist()

    def check_new_chunks(self, now: dict[Origin, int]) -> None:
        """In a new chunk, files of one extent have neighbouring addresses, in the order of the
        chunk."""
        old = {chunk for chunk, *_ in self.before}
        of_chunk: defaultdict[int, list[Origin]] = defaultdict(list)
        for origin in sorted(now):
            if origin[0] not in old and origin[2] <= EXTENT_BYTES:
                of_chunk[origin[0]].append(origin)
        for origins in of_chunk.values():
            at = now[origins[0]]
            for origin in origins:
                assert now[origin] == at
                at += -(-origin[2] // BLOCK)


sizes = st.one_of(
    st.integers(0, 3),
    st.sampled_from([4095, 4096, 4097, 65536, EXTENT_BYTES, EXTENT_BYTES + 1, 9_000_000]),
)
names = st.integers(0, 12).map(lambda number: b"f%d" % number)
changes = st.one_of(
    st.tuples(st.just("put"), st.dictionaries(names, sizes, max_size=6)),
    st.tuples(st.just("remove"), st.dictionaries(names, st.just(0), max_size=4)),
    st.tuples(st.just("rename"), st.dictionaries(names, st.just(0), max_size=3)),
    st.tuples(st.just("purge"), st.dictionaries(names, st.just(0), max_size=6)),
    st.tuples(st.just("restore"), st.dictionaries(names, st.just(0), max_size=6)),
)


@examples(100)
@given(st.lists(changes, max_size=8))
def test_random_versions(steps: list[tuple[str, dict[bytes, int]]]) -> None:
    chain, state = Chain(), dict[bytes, OwnEntry]()
    removed: dict[bytes, OwnEntry] = {}
    chunk, offset = 10, 96
    for verb, about in steps:
        if verb in ("put", "purge"):
            chunk, offset = chunk + 1, 96
        for name, size in about.items():
            old = state.get(name)
            if verb == "put":
                state[name] = file(chunk, offset, size)
                offset += 10
            elif old is None:
                if verb == "restore" and name in removed:
                    state[name] = removed.pop(name)
            elif verb == "remove":
                removed[name] = state.pop(name)
            elif verb == "rename":
                state[b"folder/" + name] = state.pop(name)
            elif verb == "purge" and old.parts:
                state[name] = file(chunk, offset, sum(part.size for part in old.parts))
                offset += 10
        chain.follow(state)
    image = chain.follow(state, Shown(uid=5, gid=6))
    assert chain.follow(state).first_block.tolist() == image.first_block.tolist()


def test_two_contents_of_one_origin_keep_their_addresses() -> None:
    """No put makes such chunks, but a snapshot may hold them."""
    twice = {b"a": file(3, 96, 5), b"b": file(3, 96, 5), b"c": file(3, 97, 5)}
    first = image_of(snapshot_of(twice), ME)
    assert sorted(first.first_block.tolist()) == [0, 1, 2, 3]
    again = image_of(snapshot_of(twice, version=2), ME, first)
    assert again.first_block.tolist() == first.first_block.tolist()
    more = {**twice, b"d": file(3, 96, 5)}
    third = image_of(snapshot_of(more, version=3), ME, again)
    assert sorted(third.first_block.tolist()) == [0, 1, 2, 3, 4]


def test_a_chain_is_not_continued_by_another_dataset() -> None:
    image = image_of(snapshot_of({}), ME)
    image.identity = UUID(int=1)
    with pytest.raises(UsageError, match="earlier image"):
        image_of(snapshot_of({}), ME, image)
