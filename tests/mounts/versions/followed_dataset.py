"""A dataset that changes, and a mount that follows it, for tests."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from diesel_fs.client.dataset import Dataset, connect
from diesel_fs.credentials import Credentials
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts import MountRequest
from tests.mounts.observed import FILE_BYTES, current_stats, figures, noise
from tests.waiting import wait_until

POLL_INTERVAL_S = 0.05


def tried(attempt: Callable[[int], None], tries: int = 3) -> None:
    """Call `attempt` with its number until it passes. The machine may take idle pages away at any
    moment (DAMON), but not each time."""
    for number in range(tries - 1):
        with suppress(AssertionError):
            return attempt(number)
    return attempt(tries - 1)


@dataclass
class FollowedMount:
    url: str
    at: Path
    log: Path
    request: MountRequest

    @property
    def is_native(self) -> bool:
        """Whether each version is a file system of its own, with inode numbers of its own."""
        return self.request.session == "native"

    def connected(self, *, create: bool = False) -> Dataset:
        user, key = self.request.user or None, self.request.key or None
        return connect("ds", self.url, user, key, create=create)

    def put(self, files: dict[str, bytes], gone: tuple[str, ...] = ()) -> int:
        """Return the new version. Each file is in a chunk of its own."""
        with self.connected(create=True) as dataset:
            for path in gone:
                dataset.delete(path, recursive=True)
            for path, content in files.items():
                dataset.put(content, path)
                dataset.flush()
        with self.connected() as dataset:
            return dataset.version

    def stats(self) -> dict[str, object]:
        return current_stats(self.at)

    def follow(self) -> dict[str, object]:
        return cast("dict[str, object]", self.stats()["follow"])

    def residency(self) -> Counter[str]:
        found = figures(self.stats(), "residency")
        store = cast("dict[str, int]", found.get("store", {}))
        return Counter({k: v for k, v in {**found, **store}.items() if isinstance(v, int)})

    def retired_versions(self) -> list[object]:
        return cast("list[object]", self.follow()["retired_versions"])

    def wait_for_retirement(self) -> None:
        wait_until(lambda: self.retired_versions() == [])

    def wait_for(self, version: int) -> None:
        wait_until(lambda: self.follow()["told"] == version)

    def change(self, files: dict[str, bytes], gone: tuple[str, ...] = ()) -> None:
        self.wait_for(self.put(files, gone))

    def put_together(self, files: Mapping[str, bytes]) -> None:
        with self.connected() as dataset:
            for path, content in files.items():
                dataset.put(content, path)
        with self.connected() as dataset:
            self.wait_for(dataset.version)

    def warnings(self, text: str) -> int:
        return sum(text in line for line in self.log.read_text().splitlines())

    def read_bytes(self) -> int:
        return figures(self.stats(), "reads")["bytes"]

    def snapshot(self) -> Snapshot:
        return Snapshot((self.at / ".diesel/snapshot").read_bytes())

    def entries(self, names: Iterable[str]) -> list[int]:
        snapshot = self.snapshot()
        return [snapshot.lookup(name.encode()) for name in names]

    @contextmanager
    def served_by_page_cache(self) -> Iterator[None]:
        """Assert that reads meanwhile are served by the kernel's pages, except for single ones that
        the machine may take away (see `tried`)."""
        before = self.read_bytes()
        yield
        assert self.read_bytes() - before < FILE_BYTES // 2


FILES = {
    "kept": noise(1), "changed": noise(2), "gone": noise(3), "d/kept": noise(4),
    "d/gone": noise(5), "kind": noise(6), "left/inner/f": noise(7), "z": b"small",
}  # fmt: skip


def begin(
    folder: Path, session: str, url: str = "", credentials: Credentials | None = None
) -> FollowedMount:
    at, log = folder / "mount", folder / "log"
    at.mkdir()
    url = url or (folder / "store").as_uri()
    request = MountRequest(
        url,
        "ds",
        str(at),
        session=session,
        follow=True,
        follow_interval_s=POLL_INTERVAL_S,
        log_file=str(log),
    ).with_credentials(credentials)
    prepared = FollowedMount(url, at, log, request)
    prepared.put(FILES)
    return prepared
