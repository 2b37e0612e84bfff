"""Versions that are published as deltas on earlier ones, in a real store (FORMAT.md, section 8)."""

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from diesel_fs.errors import (
    CorruptError,
    NotFoundError,
    ObjectExists,
    ObjectMissing,
)
from diesel_fs.format.chunk import ExtentInfo
from diesel_fs.format.chunk_builder import ChunkBuilder
from diesel_fs.format.chunk_id import stamp
from diesel_fs.format.entries import Bytes, ChunkId, split
from diesel_fs.format.object_names import (
    VersionForm,
    lease_object,
    snapshot_object,
    snapshot_prefix,
    version_object,
    version_of_object,
)
from diesel_fs.format.snapshot import layout as layout
from diesel_fs.format.snapshot.delta import Delta, apply_deltas, parse_delta, write_delta
from diesel_fs.format.snapshot.layout import RowsDigest
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.repository import chains
from diesel_fs.repository import versions as versions_module
from diesel_fs.repository.chains import Published
from diesel_fs.repository.interface import PurgeOptions
from diesel_fs.repository.leases import ReadLease
from diesel_fs.repository.local import LocalRepository
from diesel_fs.repository.versions import VersionStore
from diesel_fs.repository.writing import seal_and_store
from diesel_fs.storage.metadata.sqlite.store import SqliteMetadata
from diesel_fs.storage.metadata.store import MetadataChanges
from tests.examples import examples
from tests.rows import each_row

from ..datasets import dataset_state, file_contents, forget_private_copies, stored_bytes
from ..trees import facts, write
from .folder_puts import put_folder
from .test_interleavings import fold_in
from .test_losses import forged
from .test_tallies import DAMAGES

NOW = PurgeOptions(grace_s=0)
UNIT = 65536
Contents = dict[bytes, bytes]
Versions = dict[int, Contents]


@contextmanager
def always_deltas() -> Iterator[None]:
    """Of datasets of any size, and of changes of any size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chains, "_SNAPSHOT_BYTES_MIN", 0)
        patch.setattr(chains, "_SNAPSHOT_SHARE", 0)
        yield


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[LocalRepository]:
    opened = LocalRepository.open((tmp_path / "store").as_uri(), create=True)
    with always_deltas(), opened:
        yield opened


def put(
    repository: LocalRepository, files: Mapping[bytes, bytes], gone: Sequence[bytes] = ()
) -> int:
    """Put and delete; returns the version. A file of more than `UNIT` bytes gets two extents, each
    in a chunk of its own."""
    session = repository.begin("ds")
    builder = ChunkBuilder(session.identity, 1 << 22)

    def store() -> ChunkId:
        chunk, parts, _ = seal_and_store(builder, session.objects, session.identity, session.new_id)
        session.commit(bytes(parts[0]), bytes(parts[1]))
        builder.clear()
        return chunk

    def add(path: bytes, content: bytes, size: int, part: ExtentInfo | None = None) -> None:
        builder.room(len(content))[: len(content)] = content
        builder.add_file(split(path), 0o644, len(path) << 32, size, part)

    small = {path: content for path, content in files.items() if len(content) <= UNIT}
    for path, content in small.items():
        add(path, content, len(content))
    if small:
        store()
    for path, content in files.items():
        if len(content) > UNIT:
            add(path, content[:UNIT], len(content), ExtentInfo(0, 2, 0, UNIT))
            first = stamp(store(), 0)
            rest = ExtentInfo(1, 2, UNIT, len(content) - UNIT)
            add(path, content[UNIT:], len(content), rest)
            builder.set_stamp(first)
            store()
    if gone:
        session.delete(gone)
    return session.finish()


def identity_of(repository: LocalRepository) -> UUID:
    return repository.dataset("ds").identity


def published(repository: LocalRepository) -> list[Published]:
    """All objects of versions, the latest first."""
    forms = VersionStore(repository.objects).forms(identity_of(repository))
    return [each for version in forms.versions[::-1] for each in forms.forms(version)]


def chain_of(repository: LocalRepository, version: int) -> list[VersionForm]:
    forms = VersionStore(repository.objects).forms(identity_of(repository))
    return [each.form for each in forms.chain(version)]


def from_store(repository: LocalRepository, version: int) -> Snapshot:
    """Read without private copies, and by a reader that has read nothing before."""
    return VersionStore(repository.objects).fetch_verified(identity_of(repository), version)


def from_metadata(repository: LocalRepository) -> bytes:
    """The newest version's snapshot from the metadata store alone. The private copies stay as they
    were."""
    with private_folder_set_aside():
        head = repository.meta.head("ds")
        own = VersionStore(repository.objects)
        return bytes(own.load_current(repository.meta, head, full=True).buffer)


@contextmanager
def private_folder_set_aside() -> Iterator[None]:
    folder = tempfile.mkdtemp(prefix="diesel-cache-")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", folder)
            yield
    finally:
        shutil.rmtree(folder)


def check_newest(repository: LocalRepository) -> None:
    version = repository.meta.head("ds").version
    assert bytes(from_store(repository, version).buffer) == from_metadata(repository)


@contextmanager
def before_each(
    repository: LocalRepository, operation: str, act: Callable[[str], None]
) -> Iterator[None]:
    """Calls `act` with the name before each operation on an object of versions."""
    real = getattr(repository.objects, operation)

    def wrapped(name: str, *rest: object) -> object:
        if name.startswith(snapshot_prefix(identity)):
            act(name)
        return real(name, *rest)

    identity = identity_of(repository)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repository.objects, operation, wrapped)
        yield


def file_of(repository: LocalRepository, version: int, base: int = 0) -> Path:
    name = version_object(identity_of(repository), VersionForm(version, base))
    path = repository.url.path / name
    path.chmod(0o644)
    return path


# Every kind of change


def test_each_change_gives_the_version_that_a_full_build_gives(
    repository: LocalRepository, tmp_path: Path
) -> None:
    source = write(tmp_path / "source", {"a": b"1", "d/b": b"2", "d/e/c": b"3", "x": b"4"})

    def again() -> None:
        put_folder(repository, source, delete=True)
        check_newest(repository)
        assert repository.verify("ds").problems == []
        assert dataset_state(repository) == facts(source)

    again()
    write(source, {"new": b"5", "d/new/deep": b""})
    again()
    write(source, {"a": b"other"})
    again()
    (source / "x").chmod(0o600)
    os.utime(source / "d", ns=(5, 5))
    again()
    (source / "link").symlink_to("a")
    (source / "d/dangling").symlink_to("/none")
    again()
    write(source, {"large": os.urandom(3 * 65536 + 5)})
    again()
    write(source, {"large": os.urandom(2 * 65536)})
    again()
    shutil.rmtree(source / "d/e")
    (source / "x").unlink()
    write(source, {"x/in a folder": b"6", "d/e": b"in place of a folder"})
    again()
    shutil.rmtree(source / "x")
    (source / "d/e").unlink()
    write(source, {"x": b"4", "d/e/c": b"3"})
    again()
    shutil.rmtree(source / "d")
    (source / "large").unlink()
    (source / "link").unlink()
    again()
    forms = [each.form for each in published(repository)]
    assert sum(bool(form.base) for form in forms) == len(forms) - 1
    assert len(chain_of(repository, forms[0].version)) <= 8


def test_a_file_with_entries_below_it_is_shadowed_in_each_form(repository: LocalRepository) -> None:
    """The file shows again when the last entry below it goes."""
    put(repository, {b"a": b"a file", b"other": b""})
    steps: list[tuple[Contents, list[bytes]]] = [
        ({b"a/b/c": b"below"}, []),
        ({b"a": b"another", b"a/d": b""}, []),
        ({}, [b"a/b/c"]),
        ({}, [b"a/d"]),
        ({b"a/d": b"again"}, [b"a"]),
        ({}, [b"a/d", b"other"]),
    ]
    for files, gone in steps:
        put(repository, files, gone)
        check_newest(repository)
    assert repository.view("ds").entry_count == 1


def file_paths(view: Snapshot) -> set[bytes]:
    return set(view.paths(view.files()))


class Deltas(RuleBasedStateMachine):
    """Every published version against the contents that were put, and the newest also against the
    snapshot that is made from the metadata store alone."""

    @initialize()
    def open(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="diesel-deltas-"))
        self.patch = pytest.MonkeyPatch()
        self.patch.setenv("XDG_CACHE_HOME", str(self.home / "cache"))
        self.patch.setattr(chains, "_SNAPSHOT_BYTES_MIN", 0)
        self.patch.setattr(chains, "_SNAPSHOT_SHARE", 0)
        self.repository = LocalRepository.open((self.home / "store").as_uri(), create=True)
        self.model: Contents = {b"first": b"1"}
        self.versions: Versions = {}
        self.views: dict[int, bytes] = {}
        self.checked: list[Published] = []
        self.done(put(self.repository, self.model))

    def teardown(self) -> None:
        if hasattr(self, "home"):
            self.repository.close()
            self.patch.undo()
            shutil.rmtree(self.home)

    def done(self, version: int) -> None:
        self.versions[version] = dict(self.model)

    names = st.sampled_from([b"a", b"b", b"d", b"d/a", b"d/b", b"d/e", b"d/e/c", b"first"])
    contents = st.binary(max_size=3) | st.integers(1, 9).map(lambda n: bytes([n]) * (UNIT + n))

    @rule(files=st.dictionaries(names, contents, min_size=1, max_size=3))
    def put(self, files: Contents) -> None:
        self.model |= files
        self.done(put(self.repository, files))

    @rule(gone=st.sets(names, min_size=1, max_size=3))
    def delete(self, gone: set[bytes]) -> None:
        """Also paths that are not there."""
        for path in gone:
            self.model.pop(path, None)
        self.done(put(self.repository, {}, sorted(gone)))

    @rule(files=st.dictionaries(names, contents, max_size=2), gone=st.sets(names, max_size=2))
    def put_and_delete(self, files: Contents, gone: set[bytes]) -> None:
        if files or gone:
            self.model |= files
            for path in gone:
                self.model.pop(path, None)
            self.done(put(self.repository, files, sorted(gone)))

    @rule(keep=st.sampled_from([-1, 0, 2]), grace_s=st.sampled_from([-1, 0]))
    def purge(self, keep: int, grace_s: int) -> None:
        self.repository.purge("ds", PurgeOptions(0, keep, grace_s))
        head = self.repository.meta.head("ds").version
        self.done(head)
        assert chain_of(self.repository, head) == [(head, 0)]

    @rule()
    def recover(self) -> None:
        assert self.repository.recover("ds").problems == []
        self.done(self.repository.meta.head("ds").version)

    @rule()
    def reopen(self) -> None:
        self.repository.close()
        self.repository = LocalRepository.open(self.repository.url)

    @rule()
    def lose_private_copies(self) -> None:
        shutil.rmtree(self.home / "cache", ignore_errors=True)

    @rule(lazy=st.booleans(), path=names)
    def look_up(self, lazy: bool, path: bytes) -> None:
        view = self.repository.view("ds", lazy=lazy)
        whole = from_store(self.repository, view.version)
        assert view.lookup(path) == whole.lookup(path)
        assert view.children(0) == whole.children(0)

    @rule()
    def verify(self) -> None:
        assert self.repository.verify("ds").problems == []

    @rule()
    def read_each_version(self) -> None:
        for version, content in self.contents_by_version().items():
            view = self.repository.view_at("ds", version)
            assert bytes(view.buffer) == bytes(from_store(self.repository, version).buffer)
            assert file_contents(view, self.repository) == content

    def contents_by_version(self) -> Versions:
        """Of the published versions, without those that a purge has made."""
        published = self.repository.snapshots.versions(identity_of(self.repository))
        return {each: visible(self.versions[each]) for each in published if each in self.versions}

    @invariant()
    def each_version_is_read_as_it_was_written(self) -> None:
        if not hasattr(self, "home") or (objects := published(self.repository)) == self.checked:
            return
        self.checked = objects
        kept = [each.version for each in self.repository.kept_versions("ds")]
        assert kept == self.repository.snapshots.versions(identity_of(self.repository))
        assert kept[-1] == self.repository.meta.head("ds").version
        check_newest(self.repository)
        for version in kept:
            assert len(chain_of(self.repository, version)) <= 8
            view = from_store(self.repository, version)
            if version in self.versions:
                assert file_paths(view) == {*visible(self.versions[version])}
                assert self.views.setdefault(version, bytes(view.buffer)) == bytes(view.buffer)


def visible(contents: Contents) -> Contents:
    """Without files that a folder hides."""
    hidden = {path[:i] for path in contents for i in range(len(path)) if path[i : i + 1] == b"/"}
    return {path: content for path, content in contents.items() if path not in hidden}


Deltas.TestCase.settings = examples(40, steps=25)
TestDeltas = Deltas.TestCase


# Bytes


@pytest.fixture
def large(tmp_path: Path) -> Iterator[LocalRepository]:
    """3,000 entries, and the usual limits of deltas."""
    with LocalRepository.open((tmp_path / "store").as_uri(), create=True) as opened:
        put(opened, {b"d%d/file-%d" % (i % 30, i): b"" for i in range(3000)})
        yield opened


@contextmanager
def written_bytes(repository: LocalRepository) -> Iterator[list[int]]:
    """The lengths of all objects of versions that are written meanwhile."""
    lengths = list[int]()
    real = repository.objects.put

    def counted(name: str, parts: Sequence[Bytes]) -> None:
        if version_of_object(name) is not None and "/snapshots/" in name:
            lengths.append(sum(map(len, parts)))
        real(name, parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repository.objects, "put", counted)
        yield lengths


def test_a_put_of_one_file_writes_little(large: LocalRepository) -> None:
    whole = published(large)[0].bytes
    assert whole > 150_000
    with written_bytes(large) as lengths:
        put(large, {b"d7/new": b"1"})
        assert len(lengths) == 1
        assert sum(lengths) < 4096
        for i in range(49):
            put(large, {b"d%d/new-%d" % (i, i): b"%d" % i})
    assert len(lengths) == 50
    assert sum(lengths) < 200_000 < 50 * whole // 40
    check_newest(large)


def test_a_reader_that_has_the_version_before_reads_little(large: LocalRepository) -> None:
    large.view("ds")
    version = put(large, {b"d7/new": b"1"})
    read = list[int]()
    real = large.objects.get

    def counted(name: str, start: int = 0, length: int | None = None) -> bytearray:
        content = real(name, start, length)
        read.append(len(content))
        return content

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large.objects, "get", counted)
        view = VersionStore(large.objects).load(identity_of(large), version)
    assert view.lookup(b"d7/new") > 0
    assert sum(read) < 4096


# Damage


def three_links(repository: LocalRepository) -> tuple[int, int, int]:
    """Three versions: a snapshot, a delta on it, and a small delta on that."""
    first = put(repository, {b"first": b"1"})
    second = put(repository, {b"d/%d" % i: b"%d" % i for i in range(60)})
    third = put(repository, {b"third": b"3"})
    assert chain_of(repository, third) == [(third, second), (second, first), (first, 0)]
    return first, second, third


EXPECTED: Contents = {
    b"first": b"1",
    b"third": b"3",
    **{b"d/%d" % i: b"%d" % i for i in range(60)},
}


def flipped(at: int) -> Callable[[Path], None]:
    def flip(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[at] ^= 1
        file.write_bytes(content)

    return flip


in_header, in_body = flipped(20), flipped(-65)
LINKS = [
    *((0, in_header), (0, in_body), (0, Path.unlink)),
    *((1, in_header), (1, in_body), (1, Path.unlink)),
    *((2, in_header), (2, in_body)),
]
IDS = [
    *("the snapshot's header", "the snapshot's body", "no snapshot"),
    *("the first delta's header", "the first delta's body", "no first delta"),
    *("the second delta's header", "the second delta's body"),
]
Damage = Callable[[Path], None]


@contextmanager
def damaged(repository: LocalRepository, link: int, damage: Damage) -> Iterator[str]:
    """One of `three_links` is damaged meanwhile, and no reader has a private copy. Yields what an
    error must name: the object, or the version if it is missing."""
    newest = repository.snapshots.newest(identity_of(repository))
    form = chain_of(repository, newest)[::-1][link]
    file = file_of(repository, *form)
    whole = file.read_bytes()
    forget_private_copies()
    damage(file)
    name = version_object(identity_of(repository), form)
    try:
        yield name if file.exists() else f"version {form.version}"
    finally:
        file.write_bytes(whole)


@pytest.fixture(scope="module")
def linked_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a store with `three_links`, of which each test takes a copy."""
    folder = tmp_path_factory.mktemp("linked") / "store"
    with always_deltas(), LocalRepository.open(folder.as_uri(), create=True) as repository:
        three_links(repository)
    return folder


@contextmanager
def copy_of(store: Path, folder: Path) -> Iterator[LocalRepository]:
    """A copy of a store, of which nobody has read anything."""
    shutil.copytree(store, folder / "store")
    forget_private_copies()
    with always_deltas(), LocalRepository.open((folder / "store").as_uri()) as repository:
        yield repository


@pytest.fixture
def linked(linked_store: Path, tmp_path: Path) -> Iterator[LocalRepository]:
    with copy_of(linked_store, tmp_path) as repository:
        yield repository


@each_row(("link", "damage"), LINKS, IDS)
def test_verify_names_a_damaged_or_missing_link(
    linked: LocalRepository, link: int, damage: Damage
) -> None:
    with damaged(linked, link, damage) as name, LocalRepository.open(linked.url) as other:
        problems = other.verify("ds").problems
        assert any(name in problem for problem in problems), problems
        assert len(problems) == 3 - link - (damage is Path.unlink)


@each_row(("link", "damage"), LINKS, IDS)
def test_readers_with_metadata_get_the_current_state_in_spite_of_damage(
    linked: LocalRepository, link: int, damage: Damage
) -> None:
    for lazy in (True, False):
        with damaged(linked, link, damage), LocalRepository.open(linked.url) as other:
            view = other.view("ds", lazy=lazy)
            assert file_contents(view, other) == EXPECTED
            assert view.version == linked.meta.head("ds").version


@each_row(("link", "damage"), LINKS, IDS)
def test_without_metadata_an_error_names_the_link(
    linked: LocalRepository, link: int, damage: Damage
) -> None:
    """Otherwise an older version would silently be shown in place of the newest."""
    for lazy in (True, False):
        with damaged(linked, link, damage) as name, pytest.raises(CorruptError, match=name):
            without_metadata(linked).view("ds", lazy=lazy)
        blind = without_metadata(linked)
        assert file_contents(blind.view("ds", lazy=lazy), blind) == EXPECTED


def without_metadata(repository: LocalRepository) -> LocalRepository:
    """As a reader opens the store who cannot use its metadata."""
    return LocalRepository(repository.objects, None, url=repository.url)


@each_row(
    ("link", "damage"), [each for each in LINKS if each[1] is not in_body], [*IDS[::3], *IDS[2::3]]
)
def test_versions_that_cannot_be_read_are_not_listed(
    linked: LocalRepository, link: int, damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    """Only headers are read for the list, so damage behind them is not seen."""
    versions = linked.snapshots.versions(identity_of(linked))
    with damaged(linked, link, damage) as name, caplog.at_level(logging.WARNING):
        assert [each.version for each in linked.kept_versions("ds")] == versions[:link]
    left_out = versions[link + (damage is Path.unlink) :]
    assert all(f"version {version}" in caplog.text for version in left_out)
    assert name in caplog.text


@each_row(
    ("link", "damage", "has_copies"),
    [(*each, has_copies) for has_copies in (True, False) for each in LINKS],
    [f"{name}, {has_copies}" for has_copies in (True, False) for name in IDS],
)
def test_a_put_that_reads_the_chain_heals_it_and_otherwise_recover_does(
    linked_store: Path, tmp_path: Path, link: int, damage: Damage, has_copies: bool
) -> None:
    """The healed version can be read from the store alone. A put whose machine has a private copy
    does not read the chain."""
    with copy_of(linked_store, tmp_path) as repository:
        newest = repository.view("ds").version
        damage(file_of(repository, *chain_of(repository, newest)[::-1][link]))
        if not has_copies:
            forget_private_copies()
        with LocalRepository.open(repository.url) as other:
            version = put(other, {b"next": b"4"})
            if has_copies and other.verify("ds").problems:
                other.recover("ds")
                version = other.snapshots.newest(identity_of(other))
            assert file_contents(from_store(other, version), other) == {**EXPECTED, b"next": b"4"}
            other.purge("ds", NOW)
            assert other.verify("ds").problems == []


def test_the_same_put_replaces_a_damaged_delta(linked: LocalRepository) -> None:
    """A put that finds nothing to do writes the version again."""
    newest = linked.snapshots.newest(identity_of(linked))
    form = chain_of(linked, newest)[0]
    in_body(file_of(linked, *form))
    forget_private_copies()
    assert file_contents(linked.view("ds"), linked) == EXPECTED
    assert linked.begin("ds").finish() == newest
    assert file_contents(from_store(linked, newest), linked) == EXPECTED
    assert linked.verify("ds").problems == []


# Which versions stay


def check_all(repository: LocalRepository, contents: Mapping[int, Contents]) -> None:
    """Each published version is read from the store as it was written."""
    for version in VersionStore(repository.objects).versions(identity_of(repository)):
        view = from_store(repository, version)
        expected = contents.get(version)
        if expected is not None:  # otherwise a purge's own
            assert file_contents(view, repository) == expected


def check_chains(repository: LocalRepository) -> None:
    """Each published version has all that it builds on."""
    forms = VersionStore(repository.objects).forms(identity_of(repository))
    for version in forms.versions:
        forms.chain(version)


def put_some(repository: LocalRepository, count: int, before: Versions) -> Versions:
    """Some more versions after `before`, in which every third file is replaced later."""
    versions, state = dict(before), dict(before[max(before)]) if before else {}
    for _ in range(count):
        number = len(versions)
        files = {b"d/%d" % number: b"%d" % number, b"e%d" % (number % 3): b"%d" % number}
        state |= files
        versions[put(repository, files)] = dict(state)
    return versions


NOBODY = b"no lease at all"


@contextmanager
def nothing_expires(repository: LocalRepository) -> Iterator[None]:
    """An unreadable lease holds every version."""
    name = lease_object(identity_of(repository), "0" * 32)
    repository.objects.replace(name, [NOBODY])
    yield
    repository.objects.delete(name)


def test_versions_that_expire_go_before_what_they_build_on(repository: LocalRepository) -> None:
    versions = put_some(repository, 3, {})
    deleted = list[str]()

    def look(name: str) -> None:
        check_chains(repository)
        deleted.append(name)

    with before_each(repository, "delete", look):
        for _ in range(24):
            versions = put_some(repository, 1, versions)
            check_chains(repository)
    assert len(deleted) > 10
    left = repository.snapshots.versions(identity_of(repository))
    assert set(left) >= set(sorted(versions)[-8:])
    assert len(left) <= 8 + 7
    check_all(repository, versions)


def test_a_leased_version_keeps_what_it_builds_on(repository: LocalRepository) -> None:
    versions = put_some(repository, 3, {})
    *_, leased = sorted(versions)
    chain = {form.version for form in chain_of(repository, leased)}
    assert len(chain) > 1
    identity = identity_of(repository)
    lease = ReadLease.take(repository.objects, identity, leased)
    for as_snapshot in (True, False):
        versions = put_some(repository, 1, versions)
        repository.publish("ds", as_snapshot=as_snapshot)  # the next ones build on it
        versions = put_some(repository, 9, versions)
        assert chain <= set(repository.snapshots.versions(identity))
        repository.purge("ds", PurgeOptions(0, 0, 0))
        assert chain | {repository.meta.head("ds").version} == set(
            repository.snapshots.versions(identity)
        )
        check_all(repository, versions)
        versions[repository.meta.head("ds").version] = versions[max(versions)]
    lease.close()
    put_some(repository, 9, versions)
    assert chain.isdisjoint(repository.snapshots.versions(identity))


def test_kept_versions_keep_what_they_build_on(repository: LocalRepository) -> None:
    versions = put_some(repository, 9, {})
    repository.purge("ds", PurgeOptions(0, 3, 0))
    left = repository.snapshots.versions(identity_of(repository))
    assert set(sorted(versions)[-3:-1]) < set(left)  # the newest has the content of the last
    check_all(repository, versions)
    repository.purge("ds", PurgeOptions(0, 0, 0))
    assert len(repository.snapshots.versions(identity_of(repository))) == 1


@pytest.fixture(scope="module")
def full_store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Versions]:
    """A store with more versions than are kept. Some have two forms."""
    folder = tmp_path_factory.mktemp("full") / "store"
    with always_deltas(), LocalRepository.open(folder.as_uri(), create=True) as repository:
        versions = put_some(repository, 1, {})
        with nothing_expires(repository):
            for count in (3, 2, 7):
                versions = put_some(repository, count, versions)
                as_snapshot(repository)
    return folder, versions


@each_row("step", range(1, 12))
def test_versions_removed_in_part_can_be_read(
    full_store: tuple[Path, Versions], tmp_path: Path, step: int
) -> None:
    """A process is killed before one of the deletions."""
    store, versions = full_store
    with copy_of(store, tmp_path) as repository:
        steps = list[str]()

        def kill(name: str) -> None:
            steps.append(name)
            if len(steps) == step:
                raise KeyboardInterrupt

        with before_each(repository, "delete", kill), suppress(KeyboardInterrupt):
            put_some(repository, 1, versions)
        assert len(steps) == step or step > 6
    with always_deltas(), LocalRepository.open(repository.url) as again:
        check_chains(again)
        check_all(again, versions)
        assert again.verify("ds").problems == []
        put(again, {b"next": b"1"})
        left = again.snapshots.versions(identity_of(again))
        assert set(left) > set(sorted(versions)[-6:])
        assert left[0] == chain_of(again, sorted(versions)[-6])[-1].version
        check_chains(again)


def test_a_version_with_two_forms_is_removed_delta_first(repository: LocalRepository) -> None:
    """Its snapshot keeps it readable when the version below is gone."""
    first = put(repository, {b"a": b"1"})
    second = put(repository, {b"b": b"2"})
    put(repository, {b"c": b"3"})
    identity, objects = identity_of(repository), repository.objects
    as_snapshot(repository)
    snapshot = from_store(repository, second)
    objects.put(snapshot_object(identity, second), [snapshot.buffer])  # as a purge writes it
    repository.snapshots.remove(identity, first)
    check_chains(repository)

    def look(name: str) -> None:
        check_chains(repository)

    with before_each(repository, "delete", look):
        repository.snapshots.remove(identity, second)
    check_chains(repository)


# Purge


def test_a_purge_publishes_a_snapshot_beside_a_delta(repository: LocalRepository) -> None:
    versions = put_some(repository, 4, {})
    newest = max(versions)
    assert len(chain_of(repository, newest)) > 1
    repository.purge("ds", PurgeOptions(1_000_000, -1, -1))
    assert (newest, 0) in [each.form for each in published(repository)]
    assert chain_of(repository, repository.meta.head("ds").version)[0].base == 0
    check_all(repository, versions)
    assert repository.verify("ds").problems == []


def test_versions_below_a_delta_do_not_pin_chunks(repository: LocalRepository) -> None:
    put(repository, {b"large": os.urandom(1 << 20), b"small": b"1"})
    put(repository, {b"large": os.urandom(1 << 20)})
    put(repository, {b"large": b"2"})
    assert stored_bytes(repository) > 2 << 20
    report = repository.purge("ds", PurgeOptions(0, 0, 0))
    assert report.deleted_bytes > 2 << 20
    assert report.waiting_bytes < 1 << 16
    assert stored_bytes(repository) < 1 << 16
    assert len(published(repository)) == 1
    assert file_contents(repository.view("ds"), repository) == {b"large": b"2", b"small": b"1"}


PURGES = [
    PurgeOptions(max_unused_ppm, keep, grace_s)
    for max_unused_ppm, keep, grace_s in (
        *((0, 0, 0), (0, 2, 0), (0, 0, -1)),
        *((1_000_000, 0, 0), (1_000_000, 2, -1)),
    )
]


@each_row("options", PURGES)
def test_a_dry_run_reports_the_same_as_the_purge(tmp_path: Path, options: PurgeOptions) -> None:
    url = (tmp_path / "store").as_uri()
    with always_deltas(), LocalRepository.open(url, create=True) as repository:
        versions: Versions = {}
        for count in (3, 1, 2):
            versions = put_some(repository, count, versions)
            planned = repository.purge("ds", replace(options, dry_run=True))
            done = repository.purge("ds", options)
            assert planned == replace(done, written=0, copied_bytes=0)
            check_all(repository, versions)
            versions[repository.meta.head("ds").version] = versions[max(versions)]


def test_a_dry_run_counts_what_the_purge_removes_of_many_versions(
    repository: LocalRepository,
) -> None:
    """The publications of the purge remove some of them."""
    put_some(repository, 12, {})
    planned = repository.purge("ds", replace(NOW, dry_run=True))
    done = repository.purge("ds", NOW)
    removed = planned.versions_removed, done.versions_removed
    assert removed[0] == removed[1]
    assert planned.versions_kept == done.versions_kept == 1


# Several processes


Publish = Callable[[LocalRepository], int]


def as_delta(repository: LocalRepository) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions_module, "choose_base", chains.choose_base)
        return repository.publish("ds")


def as_merged_delta(repository: LocalRepository) -> int:
    """On the snapshot, whatever lies above it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions_module, "choose_base", lambda chain, size: len(chain) - 1)
        return repository.publish("ds")


def as_snapshot(repository: LocalRepository) -> int:
    return repository.publish("ds", as_snapshot=True)


def committed(repository: LocalRepository) -> int:
    """A version that is not published."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repository.snapshots, "publish", lambda *_, **__: 0)
        put(repository, {b"committed": b"4"})
    return repository.meta.head("ds").version


FORMS = (as_delta, as_merged_delta, as_snapshot)


@each_row("one", FORMS)
@each_row("other", FORMS)
def test_two_publishers_of_one_version_agree(
    linked_store: Path, tmp_path: Path, one: Publish, other: Publish
) -> None:
    """The other publishes after the one has looked and before it writes."""
    with copy_of(linked_store, tmp_path) as repository:
        version = committed(repository)

        def publish_beside(name: str) -> None:
            if not beside:
                beside.append(name)
                with LocalRepository.open(repository.url) as second:
                    assert other(second) == version

        beside = list[str]()
        with before_each(repository, "put", publish_beside):
            assert one(repository) == version
        assert beside
        forms = [each.form for each in published(repository) if each.form.version == version]
        assert len(forms) == (1 if one is other else 2)
        expected = from_metadata(repository)
        for form in forms:
            assert bytes(read_form(repository, form).buffer) == expected
        assert repository.verify("ds").problems == []


def read_form(repository: LocalRepository, form: VersionForm) -> Snapshot:
    """Read a version by this form alone."""
    objects, identity = repository.objects, identity_of(repository)
    content = objects.get(version_object(identity, form))
    if not form.base:
        return Snapshot(content)
    parts = apply_deltas(from_store(repository, form.base), [parse_delta(content)])
    return Snapshot(b"".join(parts))


def with_other_rows(content: bytearray, form: VersionForm) -> Sequence[Bytes]:
    """Another content of a version, with right checksums."""
    digest = RowsDigest(1, 2)
    if not form.base:
        other = Snapshot(forged(Snapshot(content), b"third", "mtime_ns"))
        return layout.write(replace(other.header, rows_digest=digest), other.columns)
    delta = parse_delta(content)
    return write_delta(Delta(replace(delta.header, rows_digest=digest), delta.rows, delta.added))


@each_row("one", FORMS)
@each_row("other", FORMS)
@each_row("is_late", [False, True])
def test_another_content_of_a_version_is_refused(
    linked_store: Path, tmp_path: Path, one: Publish, other: Publish, is_late: bool
) -> None:
    """Also if the other content appears after this process has looked, and before it writes."""
    with copy_of(linked_store, tmp_path) as repository:
        version = committed(repository)
        other(repository)
        (found,) = [each for each in published(repository) if each.form.version == version]
        content = with_other_rows(repository.objects.get(found.name), found.form)
        repository.objects.delete(found.name)

        def forge(_: str) -> None:
            with suppress(ObjectExists):
                real_put(found.name, content)

        real_put = repository.objects.put
        if not is_late:
            forge("")
        with before_each(repository, "put", forge), pytest.raises(CorruptError, match="another"):
            one(repository)
        left = [each.name for each in published(repository) if each.form.version == version]
        assert left == [found.name] or (is_late and one is not other and found.name in left)
        assert bytes(repository.objects.get(found.name)) == b"".join(content)
        assert repository.recover("ds").problems == []
        repository.purge("ds", NOW)
        assert repository.verify("ds").problems == []


def test_a_delta_whose_base_goes_before_it_is_written_becomes_a_snapshot(
    linked: LocalRepository,
) -> None:
    identity, removed = identity_of(linked), list[str]()

    def remove_all(name: str) -> None:
        if not removed:
            removed.append(name)
            for version in linked.snapshots.versions(identity)[::-1]:
                linked.snapshots.remove(identity, version)

    with before_each(linked, "put", remove_all):
        version = put(linked, {b"next": b"4"})
    assert version_of_object(removed[0]) != (version, 0)
    assert [each.form for each in published(linked)] == [(version, 0)]
    check_newest(linked)
    assert linked.verify("ds").problems == []


@each_row("operation", ["put", "delete"])
@each_row("step", range(1, 5))
def test_a_put_beside_a_purge_leaves_a_version_that_can_be_read(
    linked_store: Path, tmp_path: Path, operation: str, step: int
) -> None:
    """The put ends before one of the purge's steps; the purge would remove what the put's delta
    builds on."""
    with copy_of(linked_store, tmp_path) as repository:
        steps = list[str]()

        def put_beside(name: str) -> None:
            steps.append(name)
            if len(steps) == step:
                with LocalRepository.open(repository.url) as other:
                    put(other, {b"next": b"4"})

        with before_each(repository, operation, put_beside):
            repository.purge("ds", NOW)
        expected = {**EXPECTED, b"next": b"4"} if len(steps) >= step else EXPECTED
        check_chains(repository)
        check_newest(repository)
        blind = without_metadata(repository)
        assert file_contents(blind.view("ds"), blind) == expected
        assert repository.verify("ds").problems == []
        assert step > 2 or len(steps) >= step


# Readers beside publications and purges


def replace_all(repository: LocalRepository) -> int:
    """Newer versions take the place of all others."""
    put(repository, {b"later": b"5"})
    repository.purge("ds", NOW)
    assert len(repository.snapshots.versions(identity_of(repository))) == 1
    forget_private_copies()
    return repository.meta.head("ds").version


Read = Callable[[LocalRepository], Snapshot]


def blind_view(repository: LocalRepository) -> Snapshot:
    return without_metadata(repository).view("ds")


def blind_lazy_view(repository: LocalRepository) -> Snapshot:
    return without_metadata(repository).view("ds", lazy=True)


def live_view(repository: LocalRepository) -> Snapshot:
    with LocalRepository.open(repository.url) as other:
        other.objects = repository.objects
        other.snapshots = VersionStore(repository.objects)
        return other.view("ds")


def session_view(repository: LocalRepository) -> Snapshot:
    with LocalRepository.open(repository.url) as other:
        other.objects = repository.objects
        other.snapshots = VersionStore(repository.objects)
        return other.begin("ds").view


READS = (blind_view, blind_lazy_view, live_view, session_view)


@each_row("read", READS)
@each_row("number", range(4))
@each_row("operation", ["get", "list"])
def test_a_reader_whose_chain_goes_away_gets_the_newest_version(
    linked_store: Path, tmp_path: Path, read: Read, number: int, operation: str
) -> None:
    """Before its n-th access to the objects of versions."""
    with copy_of(linked_store, tmp_path) as repository:
        third = repository.meta.head("ds").version
        left, newest = [number], list[int]()

        def replace_before(_: str) -> None:
            left[0] -= 1
            if left[0] == -1:
                newest.append(replace_all(repository))

        with before_each(repository, operation, replace_before):
            view = read(repository)
        expected = {**EXPECTED, b"later": b"5"} if view.version != third else EXPECTED
        assert view.version in (third, *newest)
        assert {path for path in expected if view.lookup(path) < 0} == set()
        assert newest or number > (0 if operation == "list" else 2)


@each_row("number", range(4))
def test_a_reader_of_one_version_gets_it_or_learns_that_it_is_gone(
    linked_store: Path, tmp_path: Path, number: int
) -> None:
    with copy_of(linked_store, tmp_path) as repository:
        third = repository.meta.head("ds").version
        left = [number]

        def replace_before(_: str) -> None:
            left[0] -= 1
            if left[0] == -1:
                replace_all(repository)

        with before_each(repository, "get", replace_before):
            try:
                view = without_metadata(repository).view_at("ds", third)
            except (ObjectMissing, NotFoundError):
                assert third not in repository.snapshots.versions(identity_of(repository))
            else:
                assert file_paths(view) == {*EXPECTED}


@each_row("number", range(4))
def test_a_chain_that_a_purge_shortens_is_read_again(
    linked_store: Path, tmp_path: Path, number: int
) -> None:
    """The purge has written the version's snapshot, and removed what its delta builds on."""
    with copy_of(linked_store, tmp_path) as repository:
        third, identity = repository.meta.head("ds").version, identity_of(repository)
        left = [number]

        def shorten(_: str) -> None:
            left[0] -= 1
            if left[0] == -1:
                as_snapshot(repository)
                for version in repository.snapshots.versions(identity)[-2::-1]:
                    repository.snapshots.remove(identity, version)
                forget_private_copies()

        with before_each(repository, "get", shorten):
            view = without_metadata(repository).view("ds")
        assert view.version == third
        assert file_contents(view, repository) == EXPECTED


def test_a_base_that_is_really_missing_is_damage(linked: LocalRepository) -> None:
    """It goes while the version is read, and the version stays."""
    newest = linked.snapshots.newest(identity_of(linked))
    _, second, first = chain_of(linked, newest)
    forget_private_copies()
    for form in (first, second):
        with damaged(linked, 0, lambda _: None):
            file = file_of(linked, *form)
            whole, gets = file.read_bytes(), list[str]()

            def remove(name: str, file: Path = file, gets: list[str] = gets) -> None:
                gets.append(name)
                if len(gets) == 1:
                    file.unlink()

            with (
                before_each(linked, "get", remove),
                pytest.raises(CorruptError, match=f"version {form.version}, on which it builds"),
            ):
                without_metadata(linked).view("ds")
            file.write_bytes(whole)


# The end of a dataset


@each_row("link", [2, 1, 0])
def test_a_deleted_dataset_keeps_the_chain_of_a_leased_version(
    linked_store: Path, tmp_path: Path, link: int
) -> None:
    with copy_of(linked_store, tmp_path) as repository:
        identity, objects = identity_of(repository), repository.objects
        versions = repository.snapshots.versions(identity)
        expected = file_contents(from_store(repository, versions[link]), repository)
        lease = ReadLease.take(objects, identity, versions[link])
        for _ in range(2):
            repository.delete_dataset("ds")
            assert repository.datasets() == []
            store = VersionStore(objects)
            assert store.versions(identity) == versions[: link + 1]
            view = store.fetch_verified(identity, versions[link])
            assert file_contents(view, repository) == expected
        lease.close()
        repository.delete_dataset("ds")
        assert list(objects.housekeeping.names(f"datasets/{identity.hex}/")) == []


def test_a_deletion_removes_deltas_before_what_they_build_on(linked: LocalRepository) -> None:
    """Also if a version has both forms."""
    identity, objects = identity_of(linked), linked.objects
    as_snapshot(linked)
    steps = list[str]()

    def look(name: str) -> None:
        forms = VersionStore(objects).forms(identity)
        for version in forms.versions:
            forms.chain(version)
        steps.append(name)

    with before_each(linked, "delete", look):
        linked.delete_dataset("ds")
    assert len(steps) == 4


# Metadata that contradict the chunks


FILES: Contents = {
    **{b"d/%d" % 10**i: b"%d" % i * 100 for i in range(5)},
    b"e/large": bytes(3 * UNIT // 2),
}
"""Of different times, and in several chunks."""


@each_row("case", DAMAGES)
def test_E13_a_delta_that_contradicts_the_chunks_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    url = (tmp_path / "store").as_uri()
    with always_deltas(), LocalRepository.open(url, create=True) as repository:
        put(repository, {}, [b"nothing"])
        before = published(repository)
        changes = SqliteMetadata.changes

        def wrong(self: SqliteMetadata, identity: UUID, since: int) -> MetadataChanges:
            found = changes(self, identity, since)
            if len(found.rows) < 4:  # before the put's own
                return found
            return replace(found, rows=DAMAGES[case](found.rows))

        with monkeypatch.context() as patch:
            patch.setattr(SqliteMetadata, "changes", wrong)
            with pytest.raises(CorruptError):
                put(repository, FILES)
        assert published(repository) == before
        put(repository, {b"last": b"1"})
        check_newest(repository)
        assert repository.verify("ds").problems == []


@each_row("case", DAMAGES)
def test_E13_changes_that_were_read_wrongly_once_make_no_delta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """The snapshot is made from the metadata store alone."""
    url = (tmp_path / "store").as_uri()
    with always_deltas(), LocalRepository.open(url, create=True) as repository:
        put(repository, {}, [b"nothing"])
        changes, wrong_ones = SqliteMetadata.changes, list[int]()

        def wrong(self: SqliteMetadata, identity: UUID, since: int) -> MetadataChanges:
            found = changes(self, identity, since)
            if len(found.rows) < 4 or wrong_ones:
                return found
            wrong_ones.append(since)
            return replace(found, rows=DAMAGES[case](found.rows))

        with monkeypatch.context() as patch:
            patch.setattr(SqliteMetadata, "changes", wrong)
            version = put(repository, FILES)
        assert wrong_ones
        assert chain_of(repository, version) == [(version, 0)]
        check_newest(repository)
        assert repository.verify("ds").problems == []


def test_E13_the_same_changes_without_damage_make_a_delta(repository: LocalRepository) -> None:
    """So the two tests above prove something."""
    put(repository, {}, [b"nothing"])
    version = put(repository, FILES)
    assert len(chain_of(repository, version)) == 2


def test_a_private_copy_of_a_version_that_was_lost_is_no_base(
    repository: LocalRepository, tmp_path: Path
) -> None:
    """An older database is put back. It lacks a commit that a reader has seen; that chunk is
    committed again later."""
    three_links(repository)
    database = repository.url.path / "meta.sqlite"
    repository.close()
    shutil.copy(database, tmp_path / "backup")
    with LocalRepository.open(repository.url) as before:
        committed(before)
        lost = before.meta.head("ds").newest
        assert before.view("ds").lookup(b"committed") > 0
    shutil.copy(tmp_path / "backup", database)
    with LocalRepository.open(repository.url) as after:
        put(after, {b"other": b"5"})
        fold_in(after, lost)
        version = put(after, {b"last": b"6"})
        assert file_contents(after.view("ds"), after)[b"committed"] == b"4"
        assert file_paths(from_store(after, version)) == {
            *(*EXPECTED, b"committed", b"other", b"last")
        }
        assert after.verify("ds").problems == []
