"""The requests that a server answers (`WIRE.md`, section 5), over one repository.

Owned here: the table of requests, and the role that each needs, which is checked before anything
else of it is looked at. Not owned: what they do (`queries.py`, `updates.py`, `jobs.py`), accounts
(`account_handlers.py`), connections. In the loop of one worker.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import fields

from diesel_fs.cache.range_reader import RangeReader
from diesel_fs.names import check_dataset_name
from diesel_fs.net.messages import Fields, Message
from diesel_fs.remote.snapshot_transfer import CompressedSnapshots
from diesel_fs.remote.values import parse_identity
from diesel_fs.repository.interface import PurgeOptions, ReportProgress
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.accounts.account import TEXT_BYTES_MAX, Account, Role

from .directory import DatasetRef, Directory, check_role, hide_store_address
from .head_cache import HeadCache
from .jobs import Jobs, Work
from .queries import QueryHandlers
from .requests import Handler, Reply, Request
from .task_handlers import TaskHandlers
from .updates import UpdateHandlers

Named = Callable[[Request, str], Awaitable[Reply]]
Identified = Callable[[Request, DatasetRef], Awaitable[Reply]]


def handlers(
    repository: LocalRepository,
    reads: RangeReader,
    pieces: CompressedSnapshots,
    markers: HeadCache | None = None,
) -> dict[str, Handler]:
    """All requests about datasets, by `do`. Markers that are given are the caller's to close."""
    return RequestTable(repository, reads, pieces, markers or HeadCache(repository)).handlers()


def takes_payload(account: Account, do: str, size: int) -> bool:
    """Whether a payload may be received, which takes memory before its request is looked at."""
    if do == "import_users":
        return account.admin and size <= TEXT_BYTES_MAX
    return do == "put" and (account.admin or max(account.grants.values(), default=0) >= Role.WRITE)


class RequestTable:
    """The requests of a server over a repository."""

    def __init__(
        self,
        repository: LocalRepository,
        reads: RangeReader,
        pieces: CompressedSnapshots,
        markers: HeadCache,
    ) -> None:
        self._repository = repository
        self._markers = markers
        self._directory = Directory(repository)
        self._asking = QueryHandlers(repository, self._directory, markers, reads, pieces)
        self._writing = UpdateHandlers(repository, self._directory, self._asking, markers)
        self._jobs = Jobs()
        self._tasks = TaskHandlers(repository)

    def handlers(self) -> dict[str, Handler]:
        """All requests, by `do`."""
        asking, writing, tasks = self._asking, self._writing, self._tasks
        return {
            "datasets": asking.datasets,
            "dataset": self._by_name(Role.READ, asking.dataset),
            "begin": self._begin,
            "put": self._by_identity(Role.WRITE, writing.put),
            "finish": self._by_identity(Role.WRITE, writing.finish),
            "snapshot": self._snapshot,
            "kept": self._by_identity(Role.READ, asking.kept),
            "read": self._by_identity(Role.READ, asking.read, include_deleted=True),
            "stat": self._by_identity(Role.READ, asking.stat),
            "list": self._by_identity(Role.READ, asking.listing),
            "reclaimable": self._by_name(Role.READ, asking.reclaimable),
            "verify": self._verify,
            "recover": self._recover,
            "purge": self._purge,
            "lease": self._by_identity(Role.READ, writing.lease, include_deleted=True),
            "delete_dataset": self._by_name(Role.ADMIN, writing.delete_dataset),
            "join": self._by_identity(Role.READ, tasks.join, include_deleted=True),
            "leave": self._by_identity(Role.READ, tasks.leave, include_deleted=True),
        }

    # Who may

    def _by_name(self, role: Role, work: Named) -> Handler:
        async def handle(request: Request) -> Reply:
            return await work(request, self._named(request, role))

        return handle

    def _by_identity(
        self, role: Role, work: Identified, *, include_deleted: bool = False
    ) -> Handler:
        """`include_deleted`: what who is reading a dataset goes on with when it has been
        deleted."""

        async def handle(request: Request) -> Reply:
            return await work(
                request, await self._identified(request, role, dying_too=include_deleted)
            )

        return handle

    def _named(self, request: Request, role: Role) -> str:
        """The dataset that a request names. Raises NoSuchDataset, PermissionDenied."""
        name = Fields(request.message, "a request").text("dataset")
        check_dataset_name(name)
        check_role(request.account, name, role, name)
        return name

    async def _identified(
        self, request: Request, role: Role, *, dying_too: bool = False
    ) -> DatasetRef:
        """The dataset whose identity a request has. Raises NoSuchDataset, PermissionDenied."""
        identity = parse_identity(Fields(request.message, "a request"))
        known = await self._asking.find_dataset(identity, include_deleted=dying_too)
        check_role(request.account, known.name, role, str(identity))
        return known

    # What is not one answer to a role

    async def _begin(self, request: Request) -> Reply:
        name = self._named(request, Role.WRITE)
        may_create = request.account.role(name) >= Role.ADMIN
        return await self._writing.begin(request, name, may_create=may_create)

    async def _snapshot(self, request: Request) -> AsyncGenerator[Reply, None]:
        known = await self._identified(request, Role.READ)
        async for reply in self._asking.snapshot(request, known):
            yield reply

    async def _verify(self, request: Request) -> AsyncGenerator[Reply, None]:
        name = self._named(request, Role.READ)
        headers_only = Fields(request.message, "verify").flag("headers_only", default=False)

        def work(tell: ReportProgress) -> Message:
            found = self._repository.verify(name, headers_only=headers_only, progress=tell)
            return found.to_message()

        how: Message = {"headers_only": headers_only}
        async for reply in self._job("verify", name, how, work):
            yield reply

    async def _recover(self, request: Request) -> AsyncGenerator[Reply, None]:
        name = self._named(request, Role.ADMIN)
        since_s: float | None = None
        message_fields = Fields(request.message, "recover")
        if request.message.get("since_s") is not None:
            since_s = message_fields.number("since_s")
        forget_lost = message_fields.flag("forget_lost", default=False)

        def work(tell: ReportProgress) -> Message:
            found = self._repository.recover(name, since_s, tell, forget_lost=forget_lost)
            return found.to_message()

        how: Message = {"since_s": since_s, "forget_lost": forget_lost}
        async for reply in self._job("recover", name, how, work):
            yield reply

    async def _purge(self, request: Request) -> AsyncGenerator[Reply, None]:
        name = self._named(request, Role.ADMIN)
        names = {each.name for each in fields(PurgeOptions)} & request.message.keys()
        options = PurgeOptions.from_message({each: request.message[each] for each in names})

        def work(tell: ReportProgress) -> Message:
            return self._repository.purge(name, options, tell).to_message()

        async for reply in self._job("purge", name, options.to_message(), work):
            yield reply

    async def _job(
        self, kind: str, name: str, how: Message, work: Work
    ) -> AsyncGenerator[Reply, None]:
        def opened(tell: ReportProgress) -> Message:
            self._markers.reopen()  # it may have been away since the server started
            return work(tell)

        with hide_store_address(name):
            async for reply in self._jobs.run(kind, name, how, opened):
                yield reply
