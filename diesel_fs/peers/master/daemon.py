"""The program of a master: from a request on stdin to the end of the task on this node.

It opens all that a master needs, in the order in which failures should be reported, and runs the
master until SIGTERM or SIGINT comes, no client has come for a while, or a newer master has taken
its rank. `PEERS.md`, section 2, describes the end. On stdout it reports its process number, then
that it is ready, or its error: one JSON object a line. One trio loop.
"""

import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import trio

from ...cache.disk.chunks import DiskTier
from ...cache.disk.marker import prepare_cache_folder
from ...cache.policies.eviction import POLICIES
from ...errors import DieselError, NoSpaceError, UsageError
from ...net.messages import error_message
from ...net.tls import make_certificate
from ...remote.open import open_repository, same_view
from ...storage.objects.cloud.direct import open_buckets_directly
from ...system import daemons
from ...urls import HostPort
from ..handshake import LocalIdentity
from ..launch import (
    ALIVE_MARK_S,
    has_successor,
    mark_alive,
    mark_ended,
    remove_folders,
    socket_path,
)
from ..members.addresses import advertised_address, listen_address
from ..members.membership import INSTANCE_BYTES, Member, Membership, resolve_node, split_address
from ..members.options import TaskRequest, chunk_policy
from ..members.registry import open_registry
from ..node.fetches import Fetch
from ..node.ledger import chunk_budget_bytes
from ..node.node_cache import CacheOptions, NodeCache
from ..node.sealed_memory import raise_descriptor_limit
from . import local
from .master import Master, MasterOptions

log = logging.getLogger("diesel.task")

LEAVE_S = 3.0
"""The time limit for leaving the registry; otherwise the registration expires by itself."""

FLUSH_TIMEOUT_S = 20.0
"""The time for writing chunks to the disk at the end: SLURM kills 30 s after its first signal."""

SUCCESSOR_POLL_S = 0.1

_BACKLOG = 256

Signals = AsyncIterator[int]


def main() -> int:
    open_buckets_directly()
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    daemons.report({"pid": os.getpid()})
    try:
        raise_descriptor_limit()
        request = TaskRequest.from_json(sys.stdin.buffer.read())
        with ExitStack() as stack:
            trio.run(_Daemon(request, stack).run)
    except DieselError as error:
        log.error("%s", error)
        daemons.report(error_message(error))
        return error.exit_code
    except Exception:
        log.exception("unexpected error in the master")
        daemons.report(error_message(DieselError("the master failed", advice="see its log")))
        return DieselError.exit_code
    return 0


class _Daemon:
    """The constructor does all that can fail at the start."""

    def __init__(self, request: TaskRequest, stack: ExitStack) -> None:
        """`stack` closes all that is opened here. Raises DieselError."""
        self._request = request
        self._task = request.name
        self._rank, self._world = resolve_node(os.environ, request.rank, request.world)
        if chunk_policy(request.evict) not in POLICIES:
            raise UsageError(f"bad --evict {request.evict!r}: one of {', '.join(POLICIES)}")
        repository = open_repository(request.url, request.credentials)
        stack.callback(repository.close)
        self._objects = repository.objects
        self._snapshot = same_view(  # its readers have just fetched this version
            repository, request.dataset, request.identity, request.version
        )
        key = request.task_key.encode() or None
        self._registry = open_registry(repository, self._task, key=key, peers=request.peers)
        stack.callback(self._registry.close)
        self._disk = self._open_disk()
        budget_bytes = chunk_budget_bytes(
            request.memory_bytes, self._snapshot.chunk_sizes, has_disk=self._disk is not None
        )
        self._warn_if_small(budget_bytes, "--memory", "in memory")
        path = socket_path(replace(request, rank=self._rank))
        stack.callback(remove_folders, path)
        self._client_socket = local.LocalSocket(path)
        stack.callback(self._client_socket.close)
        self._certificate = make_certificate() if request.peer_tls else None
        self._listener = self._bind()
        stack.callback(self._listener.close)
        bound = HostPort(*self._listener.getsockname()[:2])
        self._member = Member(
            rank=self._rank,
            instance=secrets.token_bytes(INSTANCE_BYTES),
            address=advertised_address(request.advertise, bound),
            version=self._snapshot.version,
            certificate=self._certificate.digest if self._certificate else b"",
            has_key_file=key is not None,
        )
        if self._disk is not None:
            self._disk.jobs.register(self._snapshot.identity, time.time())

    def _open_disk(self) -> DiskTier | None:
        """Returns None without `--cache-dir`, if the disk is full, or if the folder is for order
        logs, which the mount keeps by itself."""
        if not self._request.cache_dir or self._request.cache_layout == "order":
            return None
        try:
            folder = prepare_cache_folder(Path(self._request.cache_dir), self._objects)
        except NoSpaceError as error:  # a full disk only makes the cache smaller
            self._warn(f"{error.message}: this node keeps nothing on a disk")
            return None
        disk = DiskTier(
            folder,
            self._objects.store_id,
            self._request.cache_bytes or None,
            rule=self._request.eviction_rule,
        )
        if disk.folder.read_only_reason:
            daemons.report({"warning": disk.folder.read_only_reason})
        else:
            self._warn_if_small(disk.folder.limit_bytes, "--cache-size", "on the disk")
        return disk

    def _warn_if_small(self, budget_bytes: int, option: str, where: str) -> None:
        """A cache smaller than the largest chunk would seem not to work."""
        largest = int(self._snapshot.chunk_sizes.max(initial=0))
        if budget_bytes < largest:
            self._warn(
                f"{option} leaves room for {budget_bytes:,} bytes of chunks {where}, and the"
                f" largest chunk has {largest:,}: chunks larger than the room are not kept there"
            )

    def _warn_of_replaced(self, address: str) -> None:
        """Warn if two nodes seem to have the same rank. A replaced master on this machine was this
        node's own, which was killed. `address` is empty if none was replaced."""
        if address and split_address(address).host != split_address(self._member.address).host:
            self._warn(
                f"this master has replaced another one of rank {self._rank}, at {address}: give"
                " each node a --rank of its own"
            )

    def _warn_of_higher_rank(self, membership: Membership) -> None:
        """If `--world` differs between nodes, they still share the chunks."""
        last = max((each.rank for each in membership.members), default=0)
        if last >= self._world:
            self._warn(
                f"there is a node {last} in this task, but --world is {self._world} here: give the"
                " same --world on all nodes"
            )

    def _warn(self, text: str) -> None:
        log.warning("%s", text)
        daemons.report({"warning": text})

    def _bind(self) -> socket.socket:
        listen = listen_address(self._request, self._rank, self._world)
        try:
            return socket.create_server(
                listen,
                family=socket.AF_INET6 if ":" in listen.host else socket.AF_INET,
                backlog=_BACKLOG,
            )
        except OSError as error:
            raise UsageError(
                f"cannot listen for other nodes on {listen}: {os.strerror(error.errno or 0)}",
                advice="name another address or port by --listen",
            ) from error

    async def run(self) -> None:
        """Raises DieselError."""
        first = await trio.to_thread.run_sync(self._registry.renew, self._member)
        self._warn_of_replaced(first.replaced_address)
        self._warn_of_higher_rank(first)
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            try:
                master = await self._serve(first, signals)
            finally:
                with trio.move_on_after(LEAVE_S, shield=True), suppress(DieselError):
                    await trio.to_thread.run_sync(
                        self._registry.leave, self._member, abandon_on_cancel=True
                    )
            if master is not None and self._disk is not None:
                await self._flush(master, signals)

    async def _serve(self, first: Membership, signals: Signals) -> Master | None:
        """Serve until a signal comes or the master is idle, and return it; None if a newer master
        has taken its rank."""
        identity = LocalIdentity(
            rank=self._rank,
            instance=self._member.instance,
            task=self._task,
            version=self._snapshot.version,
            secret=first.secret,
            sizes=self._snapshot.chunk_sizes,
            certificate=self._certificate,
        )
        master = Master(
            identity,
            self._member,
            self._snapshot,
            self._objects,
            self._registry,
            self._make_cache,
            MasterOptions(self._world, oneshot=self._request.policy == "oneshot"),
        )
        clients = local.LocalServer(master)
        is_member = True
        async with trio.open_nursery() as nursery:

            async def be_member(*, task_status: trio.TaskStatus[None]) -> None:
                nonlocal is_member
                await master.run(first, [self._listener], task_status=task_status)
                is_member = False
                nursery.cancel_scope.cancel()

            scope, path = nursery.cancel_scope, self._client_socket.path
            nursery.start_soon(_cancel_after, scope, partial(_wait_for_signal, signals))
            await nursery.start(be_member)
            self._client_socket.listen()
            nursery.start_soon(clients.serve, self._client_socket.socket)
            nursery.start_soon(_mark_alive, path)
            wait_until_idle = partial(clients.wait_until_idle, self._request.idle_timeout_s)
            nursery.start_soon(_cancel_after, scope, wait_until_idle)
            log.info(
                "node %d of task %s is at %s: %d chunks of %s, version %d",
                self._rank, self._task.name, self._member.address, self._snapshot.chunk_count,
                self._snapshot.dataset, self._snapshot.version,
            )  # fmt: skip
            daemons.report({"ready": os.fspath(path), "rank": self._rank})
        mark_ended(path)
        self._client_socket.close()
        self._listener.close()
        return master if is_member else None

    async def _flush(self, master: Master, signals: Signals) -> None:
        path = self._client_socket.path
        with trio.move_on_after(FLUSH_TIMEOUT_S) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_after, scope, partial(_wait_for_signal, signals))
                nursery.start_soon(_cancel_after, scope, partial(_wait_for_successor, path))
                nursery.start_soon(_cancel_after, scope, master.flush_to_disk)

    def _make_cache(self, fetch: Fetch) -> NodeCache:
        policy = POLICIES[chunk_policy(self._request.evict)]
        options = CacheOptions(self._request.memory_bytes, policy, self._disk)
        snapshot = self._snapshot
        return NodeCache(
            snapshot.identity, snapshot.chunk_ids, snapshot.chunk_sizes, options, fetch
        )


async def _cancel_after(scope: trio.CancelScope, wait: Callable[[], Awaitable[object]]) -> None:
    await wait()
    scope.cancel()


async def _mark_alive(socket_path: Path) -> None:
    while True:
        await trio.sleep(ALIVE_MARK_S)
        mark_alive(socket_path)


async def _wait_for_signal(signals: Signals) -> None:
    async for number in signals:
        log.info("asked to end by signal %d", number)
        return


async def _wait_for_successor(socket_path: Path) -> None:
    while not has_successor(socket_path):  # noqa: ASYNC110  # another process sends no event
        await trio.sleep(SUCCESSOR_POLL_S)
    log.info("another master of this node is starting: it gets the memory")
