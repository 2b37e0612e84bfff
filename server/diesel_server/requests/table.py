"""The table of the requests about datasets, with the role that a user needs for each (`WIRE.md`,
section 5).

The role is checked before the fields of a request are read. For one event loop.
"""

import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable

from diesel_fs.cache.readers.range_reader import RangeReader
from diesel_fs.metrics import MetricCells
from diesel_fs.names import check_dataset_name
from diesel_fs.net.messages import Fields, Message
from diesel_fs.remote.snapshot_transfer import CompressedSnapshots
from diesel_fs.remote.values import parse_identity
from diesel_fs.repository.interface import PurgeOptions, ReportProgress
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.accounts.account import TEXT_BYTES_MAX, Account, Role

from .directory import DatasetRef, Directory, check_role, hide_store_address
from .dispatcher import Handler, Reply, Request
from .head_cache import HeadCache
from .jobs import JobTable, Work
from .queries import QueryHandlers
from .tasks import TaskHandlers
from .updates import UpdateHandlers

NamedWork = Callable[[Request, str], Awaitable[Reply]]

IdentifiedWork = Callable[[Request, DatasetRef], Awaitable[Reply]]


def takes_payload(account: Account, do: str, size: int) -> bool:
    """Called before memory is taken for the payload."""
    if do == "import_users":
        return account.admin and size <= TEXT_BYTES_MAX
    return do == "put" and (account.admin or max(account.grants.values(), default=0) >= Role.WRITE)


class RequestTable:
    def __init__(
        self,
        repository: LocalRepository,
        reads: RangeReader,
        compressed: CompressedSnapshots,
        heads: HeadCache | None = None,
        cells: MetricCells | None = None,
    ) -> None:
        self._repository = repository
        self._heads = heads or HeadCache(repository)
        directory = Directory(repository)
        self._directory = directory
        self._queries = QueryHandlers(repository, directory, self._heads, reads, compressed)
        self._updates = UpdateHandlers(repository, directory, self._queries, self._heads, cells)
        self._jobs = JobTable()
        self._tasks = TaskHandlers(repository)

    def handlers(self) -> dict[str, Handler]:
        queries, updates, tasks = self._queries, self._updates, self._tasks
        return {
            "datasets": queries.datasets,
            "dataset": self._by_name(Role.READ, queries.dataset),
            "begin": self._begin,
            "put": self._by_identity(Role.WRITE, updates.put),
            "finish": self._by_identity(Role.WRITE, updates.finish),
            "archives": self._by_identity(Role.READ, queries.archives),
            "record_archive": self._by_identity(Role.WRITE, updates.record_archive),
            "snapshot": self._snapshot,
            "kept": self._by_identity(Role.READ, queries.kept),
            "read": self._by_identity(Role.READ, queries.read, include_deleted=True),
            "stat": self._by_identity(Role.READ, queries.stat),
            "list": self._by_identity(Role.READ, queries.listing),
            "reclaimable": self._by_name(Role.READ, queries.reclaimable),
            "verify": self._verify,
            "recover": self._recover,
            "purge": self._purge,
            "lease": self._by_identity(Role.READ, updates.lease, include_deleted=True),
            "delete_dataset": self._by_name(Role.ADMIN, updates.delete_dataset),
            "join": self._by_identity(Role.READ, tasks.join, include_deleted=True),
            "leave": self._by_identity(Role.READ, tasks.leave, include_deleted=True),
        }

    # Roles

    def _by_name(self, role: Role, work: NamedWork) -> Handler:
        async def handle(request: Request) -> Reply:
            return await work(request, self._named(request, role))

        return handle

    def _by_identity(
        self, role: Role, work: IdentifiedWork, *, include_deleted: bool = False
    ) -> Handler:
        """`include_deleted` serves a deleted dataset that clients still read, too."""

        async def handle(request: Request) -> Reply:
            known = await self._identified(request, role, include_deleted=include_deleted)
            return await work(request, known)

        return handle

    def _named(self, request: Request, role: Role) -> str:
        """Checks the role. Raises NoSuchDataset, PermissionDenied."""
        name = Fields(request.message, "a request").text("dataset")
        check_dataset_name(name)
        check_role(request.account, name, role, name)
        return name

    async def _identified(
        self, request: Request, role: Role, *, include_deleted: bool = False
    ) -> DatasetRef:
        """Checks the role. Raises NoSuchDataset, PermissionDenied."""
        identity = parse_identity(Fields(request.message, "a request"))
        known = await self._queries.find_dataset(identity, include_deleted=include_deleted)
        check_role(request.account, known.name, role, str(identity))
        return known

    async def _begin(self, request: Request) -> Reply:
        name = self._named(request, Role.WRITE)
        may_create = request.account.role(name) >= Role.ADMIN
        return await self._updates.begin(request, name, may_create=may_create)

    async def _snapshot(self, request: Request) -> AsyncGenerator[Reply, None]:
        known = await self._identified(request, Role.READ)
        async for reply in self._queries.snapshot(request, known):
            yield reply

    async def _verify(self, request: Request) -> AsyncGenerator[Reply, None]:
        name = self._named(request, Role.READ)
        headers_only = Fields(request.message, "verify").flag("headers_only", default=False)

        def work(report: ReportProgress) -> Message:
            found = self._repository.verify(name, headers_only=headers_only, progress=report)
            return found.to_message()

        fields: Message = {"headers_only": headers_only}
        async for reply in self._job("verify", name, fields, work):
            yield reply

    async def _recover(self, request: Request) -> AsyncGenerator[Reply, None]:
        name = self._named(request, Role.ADMIN)
        since_s: float | None = None
        own = Fields(request.message, "recover")
        if request.message.get("since_s") is not None:
            since_s = own.number("since_s")
        forget_lost = own.flag("forget_lost", default=False)

        def work(report: ReportProgress) -> Message:
            found = self._repository.recover(name, since_s, report, forget_lost=forget_lost)
            return found.to_message()

        fields: Message = {"since_s": since_s, "forget_lost": forget_lost}
        async for reply in self._job("recover", name, fields, work):
            yield reply

    async def _purge(self, request: Request) -> AsyncGenerator[Reply, None]:
        name = self._named(request, Role.ADMIN)
        names = {each.name for each in dataclasses.fields(PurgeOptions)} & request.message.keys()
        options = PurgeOptions.from_message({each: request.message[each] for each in names})

        def work(report: ReportProgress) -> Message:
            return self._repository.purge(name, options, report).to_message()

        async for reply in self._job("purge", name, options.to_message(), work):
            yield reply

    async def _job(
        self, kind: str, name: str, fields: Message, work: Work
    ) -> AsyncGenerator[Reply, None]:
        def opened(report: ReportProgress) -> Message:
            self._heads.reopen()  # the metadata store may have been away since the server started
            return work(report)

        with hide_store_address(name):
            async for reply in self._jobs.run(kind, name, fields, opened):
                yield reply
