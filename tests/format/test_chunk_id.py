"""Chunk IDs: their text, their order, and that a later write always has a greater ID."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.errors import ConflictError
from diesel_fs.format.chunk_id import (
    LOWEST,
    IdFields,
    IdSource,
    chunk_id_text,
    id_fields,
    id_seconds,
    parse_chunk_id,
    same_writer,
)
from diesel_fs.format.entries import ChunkId
from tests.rows import each_row

IDS = st.binary(min_size=16, max_size=16).map(ChunkId)


class Machine:
    def __init__(self, seconds: float, machine: int = 5) -> None:
        self.seconds = seconds
        self.process = 1
        self.draws = 0
        self.source = IdSource(machine, lambda: self.seconds, self.entropy, lambda: self.process)

    def entropy(self, width: int) -> bytes:
        self.draws += 1
        return (self.draws * 7919 % 251).to_bytes(1, "big") * width


@given(IDS, IDS)
def test_K7_text_sorts_as_the_id(one: ChunkId, other: ChunkId) -> None:
    assert (chunk_id_text(one) < chunk_id_text(other)) == (one < other)
    assert parse_chunk_id(chunk_id_text(one)) == one
    assert id_fields(one).id() == one
    assert (id_fields(one) < id_fields(other)) == (one < other)


@each_row("text", ["", "x" * 21, "x" * 23, "!" * 22, "z" * 22, "-" * 21 + "/"])
def test_other_text_is_not_an_id(text: str) -> None:
    with pytest.raises(ValueError, match="chunk ID"):
        parse_chunk_id(text)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-5, 5), st.booleans()), max_size=60))
def test_K1_each_id_is_greater_than_all_before(steps: list[tuple[int, int, bool]]) -> None:
    """Four writers in turn, with clocks that jump and forks."""
    writers = [Machine(1_000_000.0 + skew, machine=skew % 2) for skew in range(4)]
    newest = LOWEST
    for writer, jump, fork in steps:
        machine = writers[writer]
        machine.seconds += jump
        machine.process += fork
        made = machine.source.next(newest)
        assert made > newest
        newest = made


def test_two_writers_in_turn_do_not_run_ahead_of_the_clock() -> None:
    """FORMAT.md, section 3, rule 3."""
    one, two = Machine(5000.0, machine=9), Machine(5000.0, machine=3)
    newest = LOWEST
    for _ in range(500):
        newest = one.source.next(newest)
        newest = two.source.next(newest)
    assert id_seconds(newest) == 5000


def test_later_extents_keep_the_writer_part() -> None:
    machine = Machine(5000.0)
    first = machine.source.next(LOWEST)
    other = IdFields(5000, 2**48 - 1, 7, 0).id()
    for newest in (LOWEST, other, other):
        later = machine.source.next(newest, writer_of=first)
        assert later > newest
        assert later > first
        assert same_writer(later, first)


def test_K4_timestamps_end_in_2106_and_not_in_2038() -> None:
    for seconds in (2**31 - 1, 2**31, 2**32 - 1):
        assert id_seconds(Machine(seconds).source.next(LOWEST)) == seconds
    with pytest.raises(ConflictError, match="copy into a new dataset"):
        Machine(2.0**32).source.next(LOWEST)


def test_a_fork_draws_a_new_process_part() -> None:
    machine = Machine(time.time())
    parent = machine.source.next(LOWEST)
    machine.process += 1
    assert not same_writer(parent, machine.source.next(LOWEST))
