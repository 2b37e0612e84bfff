"""K2: writers on hosts whose clocks differ. Live and rebuilt metadata are always the same."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path

import pytest

from diesel_fs.errors import CorruptError, ObjectStoreRefused
from diesel_fs.format.chunk_id import IdFields, id_seconds
from diesel_fs.repository.local import LocalRepository
from diesel_fs.repository.validation import CLOCK_ALLOWANCE_S, FOLLOW_ALLOWANCE_S
from diesel_fs.storage.metadata.sqlite.store import SqliteMetadata

from ..datasets import content
from .test_interleavings import Sealed, Writer, rebuilt_equals_live

REAL = time.time
TOLERATED_S = CLOCK_ALLOWANCE_S - 60
TEN_MINUTES_S = 600


@dataclass
class Host:
    url: str
    skew_s: float
    fill: bytes
    store_skew_s: float = 0.0  # of the metadata store's clock, as this host sees it
    sealed: list[Sealed] = field(default_factory=list)

    def __post_init__(self) -> None:
        with self.clock():
            self.repository = LocalRepository.open(self.url)
            self.writer = Writer(self.repository)

    @contextmanager
    def clock(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "time", self.now)
            patch.setattr(SqliteMetadata, "now_s", lambda _: REAL() + self.store_skew_s)
            yield

    def now(self) -> float:
        return REAL() + self.skew_s

    def seal(self) -> None:
        with self.clock():
            self.writer.add(b"x", self.fill)
            self.writer.add(self.fill, b"its own")
            self.sealed.append(self.writer.seal())

    def commit(self) -> None:
        with self.clock():
            self.sealed[-1].commit()

    def delete(self) -> None:
        with self.clock():
            self.writer.session.delete([b"x"])


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = (tmp_path / "store").as_uri()
    with LocalRepository.open(url, create=True) as repository:
        repository.begin("ds")
    return url


def shows(url: str, expected: bytes | None) -> None:
    with LocalRepository.open(url) as repository:
        assert content(repository, b"x") == expected
        rebuilt_equals_live(repository)


def orders() -> list[tuple[int, ...]]:
    """Return all orders in which two hosts can each seal, then commit."""
    return sorted(set(permutations((0, 0, 1, 1))))


@pytest.mark.parametrize("skews", [(TOLERATED_S, 0.0), (0.0, -TOLERATED_S), (-120.0, 120.0)])
@pytest.mark.parametrize("order", orders())
def test_K1_K2_skewed_writers(url: str, order: tuple[int, ...], skews: tuple[float, float]) -> None:
    """A writer that begins after another's commit wins, whatever the clocks."""
    hosts = [Host(url, skews[0], b"A"), Host(url, skews[1], b"B")]
    steps: list[tuple[int, str]] = []
    for turn in order:
        step = "commit" if hosts[turn].sealed else "seal"
        getattr(hosts[turn], step)()
        steps.append((turn, step))
    with LocalRepository.open(url) as repository:
        live = content(repository, b"x")
        assert live == max(hosts, key=lambda host: host.sealed[0].id).fill
        for first, second in ((0, 1), (1, 0)):
            if steps.index((first, "commit")) < steps.index((second, "seal")):
                assert live == hosts[second].fill
        assert content(repository, b"A") == content(repository, b"B") == b"its own"
        rebuilt_equals_live(repository)


@pytest.mark.parametrize("skew", [TOLERATED_S, -TOLERATED_S])
def test_K2_a_delete_by_a_host_with_another_clock(url: str, skew: float) -> None:
    skewed, right = Host(url, skew, b"A"), Host(url, 0, b"B")
    for first, second in ((skewed, right), (right, skewed)):
        first.seal()
        first.commit()
        second.delete()
        shows(url, None)
        first.seal()
        first.commit()
        shows(url, first.fill)


def test_K2_a_host_that_is_ten_minutes_ahead_may_not_write(url: str) -> None:
    with LocalRepository.open(url) as repository:
        before = repository.dataset("ds").head
        with pytest.raises(ObjectStoreRefused, match="600 s ahead of the repository's"):
            Host(url, TEN_MINUTES_S, b"A")
        assert repository.dataset("ds").head == before


def test_K2_a_host_whose_clock_jumps_ahead_in_the_middle_commits_nothing(url: str) -> None:
    """The commit is checked against the time of the metadata store, which does not jump."""
    jumping, right = Host(url, 0, b"A"), Host(url, 0, b"B")
    jumping.skew_s = TEN_MINUTES_S
    jumping.seal()
    with pytest.raises(CorruptError, match="clock"):
        jumping.commit()
    right.seal()
    right.commit()
    with LocalRepository.open(url) as repository:
        assert list(repository.chunk_ids(right.writer.session.identity)) == [right.sealed[0].id]
    shows(url, b"B")


def test_K2_ids_from_the_future_are_followed_and_later_ones_refused(url: str) -> None:
    """Such IDs come from a time when the metadata store's clock was wrong. No client can push the
    IDs further ahead."""
    ahead = Host(url, TEN_MINUTES_S, b"A", store_skew_s=TEN_MINUTES_S)
    ahead.seal()
    ahead.commit()
    right, other = Host(url, 0, b"B"), Host(url, 0, b"C")
    for host in (right, other, right, other):
        host.seal()
        assert id_seconds(host.sealed[-1].id) - id_seconds(ahead.sealed[0].id) <= 1
        host.commit()
        shows(url, host.fill)
    newest = id_seconds(other.sealed[-1].id)
    right.writer.add(b"x", b"pushed ahead")
    pushed = right.writer.seal(IdFields(newest + FOLLOW_ALLOWANCE_S + 1, 1, 1, 0).id())
    with pytest.raises(CorruptError, match="from the future"):
        pushed.commit()
    with LocalRepository.open(url) as repository:
        assert content(repository, b"x") == b"C"
        assert pushed.id not in list(repository.chunk_ids(right.writer.session.identity))


def test_K2_a_recovery_since_a_time_by_a_host_that_is_ahead(url: str) -> None:
    """It looks back further than clocks may differ, so that nothing is missed."""
    right, ahead = Host(url, 0, b"A"), Host(url, TOLERATED_S, b"B")
    right.seal()
    right.commit()
    right.seal()
    with ahead.clock(), LocalRepository.open(url) as repository:
        repository.recover("ds", since_s=ahead.now())
        assert right.sealed[-1].id in repository.view("ds").chunk_ids
        assert repository.verify("ds").problems == []
        rebuilt_equals_live(repository)
