"""Versions as deltas among all that can happen beside them: purges, puts and rebuilds of other
processes at each access to a version's objects, losses, older metadata, and writers that know more
than the store has.

Each version that is published can be read from the store alone, and shows what was put.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from uuid import UUID

import pytest

from diesel_fs.errors import BusyError, CorruptError, DieselError, FormatError, ObjectStoreError
from diesel_fs.format.chunk_builder import ChunkBuilder
from diesel_fs.format.entries import split
from diesel_fs.format.object_names import VersionForm, snapshot_prefix, version_of_object
from diesel_fs.repository import chains, retention
from diesel_fs.repository.interface import PurgeOptions
from diesel_fs.repository.leases import PurgeLease
from diesel_fs.repository.local import LocalRepository
from diesel_fs.repository.versions import VersionStore
from diesel_fs.repository.writing import seal_and_store
from diesel_fs.storage.metadata.sqlite.store import SqliteMetadata
from diesel_fs.storage.metadata.store import MetadataChanges
from diesel_fs.storage.objects.store import ObjectStore
from tests.tiers import fast_first

from ..datasets import file_contents, forget_private_copies
from ..storage.objects.faulty_store import Fault, FaultyStore
from .purge.moved_clock import HOUR_S, MovedClock, moved_clock
from .purge.test_purge_model import PurgeModel
from .test_losses import Absence
from .test_tallies import DAMAGES as DIFFERENCES

NOW = PurgeOptions(0, 0, 0)
Contents = dict[bytes, bytes]


def always_deltas() -> pytest.MonkeyPatch:
    """From now on, each version is a delta on the one before, whatever their sizes."""
    patch = pytest.MonkeyPatch()
    for limit in ("_SNAPSHOT_BYTES_MIN", "_SNAPSHOT_SHARE", "_GEOMETRIC"):
        patch.setattr(chains, limit, 0)
    return patch


@pytest.fixture(autouse=True)
def only_deltas() -> Iterator[None]:
    patch = always_deltas()
    yield
    patch.undo()


# Operations inside each other


@pytest.fixture
def clock() -> Iterator[MovedClock]:
    with moved_clock() as clock:
        yield clock


@pytest.fixture
def repository(tmp_path: Path, clock: MovedClock) -> Iterator[LocalRepository]:
    with LocalRepository.open((tmp_path / "store").as_uri(), create=True) as opened:
        yield opened


class Versions:
    """What each version of a repository holds."""

    def __init__(self, repository: LocalRepository) -> None:
        self.repository = repository
        self.state: Contents = {}
        self.of: dict[int, Contents] = {}

    def commit(self, files: Mapping[bytes, bytes]) -> None:
        self._put(files, finish=False)

    def put(self, files: Mapping[bytes, bytes]) -> None:
        self.of[self._put(files, finish=True)] = self.state

    def _put(self, files: Mapping[bytes, bytes], *, finish: bool) -> int:
        session = self.repository.begin("ds")
        builder = ChunkBuilder(session.identity, 1 << 20, "none")
        for path, content in files.items():
            builder.room(len(content))[: len(content)] = content
            builder.add_file(split(path), 0o644, 1, len(content))
        _, parts, _ = seal_and_store(builder, session.objects, session.identity, session.new_id)
        session.commit(bytes(parts[0]), bytes(parts[1]))
        self.state = {**self.state, **files}
        return session.finish() if finish else self.repository.meta.head("ds").version


@pytest.fixture
def four(repository: LocalRepository) -> Versions:
    """A snapshot, and three deltas above it."""
    made = Versions(repository)
    made.put({b"d/%d" % i: b"%d" % i for i in range(9)})
    for i in range(3):
        made.put({b"d/%d" % i: b"new", b"new%d" % i: b"%d" % i})
    assert [bool(form.base) for form in forms(repository)] == [False, True, True, True]
    return made


def identity_of(repository: LocalRepository) -> UUID:
    return repository.dataset("ds").identity


def forms(repository: LocalRepository) -> list[VersionForm]:
    """Of all versions, ascending."""
    names = repository.objects.housekeeping.names(snapshot_prefix(identity_of(repository)))
    found = [version_of_object(name) for name in names]
    return sorted(form for form in found if form is not None)


def unreadable(made: Versions) -> list[str]:
    """The published versions that the store alone does not give, and why; and the newest, if that
    does not show what was put."""
    store, identity = VersionStore(made.repository.objects), identity_of(made.repository)
    wrong = []
    for version in store.versions(identity):
        try:
            view = store.fetch_verified(identity, version)
        except FormatError as error:
            wrong.append(error.message)
    if not wrong and file_contents(view, made.repository) != made.state:
        wrong.append("the newest version shows something else")
    return wrong


class Interrupting(FaultyStore):
    """Calls `act` before the n-th time that versions are listed, or one is written or removed. What
    is read in between depends on the listing."""

    def __init__(self, inner: ObjectStore, number: int, act: Callable[[], None]) -> None:
        super().__init__(inner)
        self._left, self._act = number, act

    @contextmanager
    def _call(self, operation: str, name: str) -> Iterator[Fault]:
        if "/snapshots/" in name and operation != "get":
            self._left -= 1
            if self._left == -1:
                self._act()
        with super()._call(operation, name) as fault:
            yield fault

    @property
    def happened(self) -> bool:
        return self._left < 0


def purge(made: Versions, _: MovedClock) -> None:
    made.repository.purge("ds", NOW)


def put(made: Versions, _: MovedClock) -> None:
    made.put({b"d/7": b"put"})


def put_for_days(made: Versions, clock: MovedClock) -> None:
    """So that versions expire."""
    for i in range(3):
        clock.ahead_s += 25 * HOUR_S
        made.put({b"d/7": b"%d" % i})


def recover(made: Versions, _: MovedClock) -> None:
    made.repository.recover("ds")


def publish(made: Versions, _: MovedClock) -> None:
    made.repository.publish("ds")


def publish_snapshot(made: Versions, _: MovedClock) -> None:
    made.repository.publish("ds", as_snapshot=True)


Operation = Callable[[Versions, MovedClock], None]
PAIRS: list[tuple[Operation, Operation]] = [
    (publish, purge),
    (purge, put),
    (publish, put_for_days),
    (publish, recover),
    (publish, publish_snapshot),
    (purge, put_for_days),
    (purge, recover),
    (recover, purge),
    (recover, put),
]


@pytest.mark.parametrize(("one", "other"), fast_first(PAIRS, 2))
def test_another_process_leaves_no_version_that_cannot_be_read(
    four: Versions, clock: MovedClock, tmp_path: Path, one: Operation, other: Operation
) -> None:
    """It does its whole work at one moment of the first one's."""
    four.commit({b"mine": b"1"})
    four.repository.close()
    wrong, ahead_s, state = {}, clock.ahead_s, four.state
    for number in count():
        clock.ahead_s, four.state = ahead_s, state
        store = shutil.copytree(tmp_path / "store", tmp_path / "copy")
        forget_private_copies()

        def act(url: str = store.as_uri()) -> None:
            mine = four.repository
            with LocalRepository.open(url) as four.repository, suppress(BusyError):
                other(four, clock)
            four.repository = mine

        with LocalRepository.open(store.as_uri()) as opened:
            objects = Interrupting(opened.objects, number, act)
            four.repository = LocalRepository(objects, opened.meta, url=opened.url)
            one(four, clock)
            four.repository = opened
            happened = objects.happened
            if found := unreadable(four):
                wrong[number] = found
        shutil.rmtree(store)
        if not happened:
            break
    assert number > 3
    assert wrong == {}


def test_an_error_of_a_removal_is_only_logged(four: Versions, clock: MovedClock) -> None:
    """The put is acknowledged, and the next publication removes the rest."""
    four.commit({b"f": b"1"})
    four.repository.publish("ds", as_snapshot=True)  # nothing after it needs the four
    for i in range(2):
        clock.ahead_s += 25 * HOUR_S
        four.commit({b"f": b"%d" % i})
        refused = Fault("delete", "/snapshots/", error=ObjectStoreError("403"), times=None)
        with FaultyStore(four.repository.objects, refused) as store:
            LocalRepository(store, four.repository.meta, url=four.repository.url).publish("ds")
        assert unreadable(four) == []
    before = {form.version for form in forms(four.repository)}
    assert before > set(four.of)
    four.put({b"f": b"3"})
    assert set(four.of).isdisjoint(form.version for form in forms(four.repository)[:-1])


# Two publishers


@pytest.mark.parametrize("theirs", ["delta", "snapshot"])
def test_another_content_that_appears_meanwhile_is_refused(
    four: Versions, tmp_path: Path, theirs: str
) -> None:
    """Another process publishes the version with another time of a file, and right digests. This
    one has looked before which forms there are. Nobody learns of the difference later, since the
    next versions build on the other's."""
    repository, changes = four.repository, SqliteMetadata.changes
    four.commit({b"f": b"1"})
    version = repository.meta.head("ds").version
    repository.close()
    copy = shutil.copytree(tmp_path / "store", tmp_path / "copy")

    def changed(self: SqliteMetadata, identity: UUID, since: int) -> MetadataChanges:
        found = changes(self, identity, since)
        return replace(found, rows=DIFFERENCES["mtime_ns"](found.rows))

    with LocalRepository.open(copy.as_uri()) as other, pytest.MonkeyPatch.context() as patch:
        patch.setattr(SqliteMetadata, "changes", changed)
        assert other.publish("ds", as_snapshot=theirs == "snapshot") == version
        published = links(other)[-1]
    forget_private_copies()
    with LocalRepository.open(repository.url) as opened:
        target = links(opened)[-1].with_name(published.name)

        def publish_theirs(_: str) -> None:
            target.write_bytes(published.read_bytes())

        fault = Fault("get", "/snapshots/", act=publish_theirs)
        writer = LocalRepository(FaultyStore(opened.objects, fault), opened.meta, url=opened.url)
        with pytest.raises(CorruptError, match="another content"):
            writer.publish("ds")
        assert fault.happened
        assert [form for form in forms(opened) if form.version == version] == [
            version_of_object(published.name)
        ]


# A writer that knows more than the store has


def links(repository: LocalRepository) -> list[Path]:
    """The files of the forms of all versions, ascending."""
    found = sorted(repository.url.path.glob("datasets/*/snapshots/*"))
    for path in found:
        path.chmod(0o644)
    return found


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[704] ^= 1
    file.write_bytes(content)


def empty(file: Path) -> None:
    file.write_bytes(b"")


DAMAGES: list[Callable[[Path], None]] = [flip, empty, Path.unlink]


def has_a_private_copy(writer: LocalRepository, damage: Callable[[], None]) -> None:
    writer.view("ds")
    damage()


def has_looked_up(writer: LocalRepository, damage: Callable[[], None]) -> None:
    writer.view("ds", lazy=True)
    damage()
    forget_private_copies()


def has_read_it_damaged(writer: LocalRepository, damage: Callable[[], None]) -> None:
    damage()
    assert writer.view("ds").lookup(b"new2") > 0
    forget_private_copies()


def put_one(made: Versions) -> None:
    made.put({b"after": b"2"})


def put_nothing(made: Versions) -> None:
    made.repository.begin("ds").finish()


def put_and_recover(made: Versions) -> None:
    """A put that builds on what its machine has does not read the store's links."""
    put_one(made)
    assert made.repository.verify("ds").problems
    made.repository.recover("ds")


@pytest.mark.parametrize(
    ("knows", "write"),
    [
        (has_a_private_copy, put_and_recover),
        (has_looked_up, put_and_recover),
        (has_read_it_damaged, put_one),
        (has_read_it_damaged, put_nothing),
    ],
)
def test_a_damaged_chain_is_healed_by_a_put_that_reads_it_and_by_recover(
    four: Versions,
    tmp_path: Path,
    knows: Callable[[LocalRepository, Callable[[], None]], None],
    write: Callable[[Versions], None],
) -> None:
    """Readers that have no metadata get the newest version; older ones may stay damaged."""
    four.repository.close()
    wrong, state = {}, four.state
    for link in range(4):
        for damage in DAMAGES:
            if link == 3 and damage == Path.unlink:
                continue  # no version names the newest delta
            store = shutil.copytree(tmp_path / "store", tmp_path / "copy")
            forget_private_copies()
            with LocalRepository.open(store.as_uri()) as four.repository:
                file = links(four.repository)[link]
                four.state = state
                knows(four.repository, partial(damage, file))
                write(four)
                forget_private_copies()
                objects, url = four.repository.objects, four.repository.url
                with LocalRepository(objects, None, url=url) as blind:
                    try:
                        found = file_contents(blind.view("ds"), blind)
                        assert found == four.state
                    except (DieselError, AssertionError) as error:
                        wrong[link, damage.__name__] = str(error)
            shutil.rmtree(store)
    assert wrong == {}


# The models of other tests, if each version is a delta


class AbsenceOfDeltas(Absence):
    """The fixture `only_deltas` holds for the whole run."""

    def teardown(self) -> None:
        super().teardown()
        assert chains._SNAPSHOT_BYTES_MIN == 0


class PurgesOfDeltas(PurgeModel):
    def teardown(self) -> None:
        super().teardown()
        assert chains._SNAPSHOT_BYTES_MIN == 0


AbsenceOfDeltas.TestCase.settings = Absence.TestCase.settings
PurgesOfDeltas.TestCase.settings = PurgeModel.TestCase.settings
TestAbsenceOfDeltas = pytest.mark.deep(AbsenceOfDeltas.TestCase)
TestPurgesOfDeltas = pytest.mark.deep(PurgesOfDeltas.TestCase)


# What a review found


def test_a_second_publisher_of_a_version_writes_nothing(four: Versions) -> None:
    before = forms(four.repository)
    with LocalRepository.open(four.repository.url) as other:
        assert other.publish("ds") == before[-1].version
    assert forms(four.repository) == before


def test_a_put_during_a_purge_publishes_a_snapshot(four: Versions) -> None:
    """The purge has decided already on which versions nothing builds."""
    with PurgeLease.take(four.repository.objects, identity_of(four.repository)):
        four.put({b"during": b"1"})
    assert forms(four.repository)[-1].base == 0
    four.put({b"after": b"1"})
    assert forms(four.repository)[-1].base != 0
    assert unreadable(four) == []


def test_what_one_process_cannot_read_stays_for_what_builds_on_it(
    four: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may have read it, and its bytes may be sound."""
    identity = identity_of(four.repository)
    with LocalRepository.open(four.repository.url) as other:
        other.snapshots._forget_damaged(identity, forms(four.repository)[-1].version)
        four.put({b"next": b"1"})
        four.put({b"last": b"1"})
        before = forms(four.repository)
        newest = before[-1].version
        monkeypatch.setattr(retention, "retained_versions", lambda *_: {newest})
        retention.remove_expired_versions(other.objects, other.snapshots, identity)
    assert forms(four.repository) == before
    assert unreadable(four) == []
