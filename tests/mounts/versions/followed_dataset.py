"""A dataset that changes, and a mount that follows it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from diesel_fs.client.dataset import Dataset, connect
from diesel_fs.credentials import Credentials
from diesel_fs.mounts import MountRequest
from diesel_fs.mounts.plans.control import Control
from tests.mounts.observed import FILE_BYTES, noise, wait_until

POLL_INTERVAL_S = 0.05


def tried(attempt: Callable[[int], None], tries: int = 3) -> None:
    """Makes an attempt, given its number, until one passes: a machine may take idle pages away at
    any moment (DAMON), but not each time.
    """
    for number in range(tries - 1):
        with suppress(AssertionError):
            return attempt(number)
    return attempt(tries - 1)


@dataclass
class FollowedMount:
    """A repository, and a mount that follows one dataset of it."""

    url: str
    at: Path
    log: Path
    request: MountRequest

    def connected(self, *, create: bool = False) -> Dataset:
        """The dataset, as whoever mounts it."""
        user, key = self.request.user or None, self.request.key or None
        return connect("ds", self.url, user, key, create=create)

    def put(self, files: dict[str, bytes], gone: tuple[str, ...] = ()) -> int:
        """Puts and deletes, each file in a chunk of its own; the version then."""
        with self.connected(create=True) as dataset:
            for path in gone:
                dataset.delete(path, recursive=True)
            for path, content in files.items():
                dataset.put(content, path)
                dataset.flush()
        with self.connected() as dataset:
            return dataset.version

    def stats(self) -> dict[str, object]:
        """The statistics, as they are now."""
        with Control.connect(self.at) as control:
            return dict(control.stats())

    def follow(self) -> dict[str, object]:
        found = self.stats()["follow"]
        assert isinstance(found, dict)
        return found

    def wait_for(self, version: int) -> None:
        """Until the mount is at a version, and the kernel knows it."""
        wait_until(lambda: self.follow()["told"] == version)

    def change(self, files: dict[str, bytes], gone: tuple[str, ...] = ()) -> None:
        """Puts and deletes, and waits until it shows."""
        self.wait_for(self.put(files, gone))

    def warnings(self, text: str) -> int:
        """How many lines of the log have it."""
        return sum(text in line for line in self.log.read_text().splitlines())

    def read_bytes(self) -> int:
        """What READs that have reached the mount asked for."""
        reads = self.stats()["reads"]
        assert isinstance(reads, dict)
        return int(reads["bytes"])

    @contextmanager
    def served_by_page_cache(self) -> Iterator[None]:
        """What is read meanwhile is in the kernel's pages, so the mount is not asked for it.

        A machine may page out what is idle (see `tried`), mostly a page here and there; a file
        that was dropped is asked for whole.
        """
        before = self.read_bytes()
        yield
        assert self.read_bytes() - before < FILE_BYTES // 2


FILES = {
    "kept": noise(1), "changed": noise(2), "gone": noise(3), "d/kept": noise(4),
    "d/gone": noise(5), "kind": noise(6), "left/inner/f": noise(7), "z": b"small",
}  # fmt: skip


def begin(
    folder: Path,
    session: str,
    url: str = "",
    credentials: Credentials | None = None,
    made: type[FollowedMount] = FollowedMount,
) -> FollowedMount:
    """A dataset, not mounted yet; by default of a repository in the folder."""
    at = folder / "mount"
    at.mkdir()
    url = url or (folder / "store").as_uri()
    request = MountRequest(
        url,
        "ds",
        str(at),
        session=session,
        follow=True,
        follow_interval_s=POLL_INTERVAL_S,
        log_file=str(folder / "log"),
    ).with_credentials(credentials)
    begun = made(url, at, folder / "log", request)
    begun.put(FILES)
    return begun
