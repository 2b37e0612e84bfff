"""The program of a master: from a request on stdin to the end of the task on this node.

It opens everything that a master needs, in the order in which failures should be reported, runs the
master, and ends it: on SIGTERM or SIGINT, when it has no clients any more, or when a newer master
takes its rank. `launch.py` starts it.

When it ends for one of the first two reasons, it first makes way for another master of this node
and leaves the task, then writes the chunks in memory to its disk. That stops after
`FLUSH_TIMEOUT_S`, at once when another master starts, which needs the memory, and at a second
signal.

It reports on stdout, one JSON object a line: its process number, then that it is ready, or what
went wrong. If it is killed, its registration expires, and its socket is found dead. One trio loop.
"""

import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import trio

from ..cache.disk import DiskTier, prepare_cache_folder
from ..cache.policy import POLICIES
from ..errors import DieselError, NoSpaceError, UsageError
from ..net.messages import error_message
from ..net.tls import make_certificate
from ..remote.open import open_repository, same_view
from ..storage.objects.cloud.direct import open_buckets_directly
from ..system import daemons
from ..urls import HostPort, parse_url
from . import local
from .addresses import advertised_address, listen_address
from .handshake import LocalIdentity
from .launch import ALIVE_MARK_S, has_successor, mark_alive, mark_ended, remove_folders, socket_path
from .master import Master
from .membership import INSTANCE_BYTES, Member, Membership, resolve_node, split_address
from .node_cache import Fetch, NodeCache, chunk_budget_bytes
from .options import TaskRequest
from .registry import open_registry
from .sealed_memory import raise_descriptor_limit

log = logging.getLogger("diesel.task")

LEAVE_S = 3.0
"""How long the end waits for the registry; the registration also expires by itself."""

FLUSH_TIMEOUT_S = 20.0
"""How long writing the chunks in memory may take: SLURM kills 30 s after its first signal."""

SUCCESSOR_POLL_S = 0.1
"""How often the end looks for another master of this node meanwhile."""

_BACKLOG = 256

Signals = AsyncIterator[int]


def main() -> int:
    """Run the master that the request on stdin asks for; returns the exit code."""
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
    """A master and everything it needs. What can fail at the start fails in its constructor."""

    def __init__(self, request: TaskRequest, stack: ExitStack) -> None:
        """`stack` closes what is opened here. Raises DieselError."""
        self._request = request
        self._name = request.name
        self._rank, self._world = resolve_node(os.environ, request.rank, request.world)
        if request.evict not in POLICIES:
            raise UsageError(f"bad --evict {request.evict!r}: one of {', '.join(POLICIES)}")
        repository = open_repository(request.url, request.credentials)
        stack.callback(repository.close)
        self._objects = repository.objects
        self._snapshot = same_view(  # its readers have just fetched this version
            repository, request.dataset, request.identity, request.version
        )
        key = request.task_key.encode() or None
        self._registry = open_registry(repository, self._name, key=key, peers=request.peers)
        stack.callback(self._registry.close)
        self._disk = self._opened_disk()
        memory_bytes, sizes = request.memory_bytes, self._snapshot.chunk_sizes
        room_bytes = chunk_budget_bytes(memory_bytes, sizes, has_disk=self._disk is not None)
        self._warn_of_little(room_bytes, "--memory", "in memory")
        listen_path = socket_path(replace(request, rank=self._rank))
        stack.callback(remove_folders, listen_path)
        self._clients = local.LocalSocket(listen_path)
        stack.callback(self._clients.close)
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

    def _opened_disk(self) -> DiskTier | None:
        """The disk tier in `--cache-dir`; None without it, or where the disk is full."""
        if not self._request.cache_dir:
            return None
        try:
            folder = prepare_cache_folder(Path(self._request.cache_dir), self._objects)
        except NoSpaceError as error:  # a full disk only makes the cache smaller
            self._warn(f"{error.message}: this node keeps nothing on a disk")
            return None
        disk = DiskTier(folder, self._objects.store_id, self._request.cache_bytes or None)
        if disk.read_only_reason:
            daemons.report({"warning": disk.read_only_reason})  # the tier has logged it
        else:
            self._warn_of_little(disk.limit_bytes, "--cache-size", "on the disk")
        return disk

    def _warn_of_little(self, room_bytes: int, option: str, where: str) -> None:
        """Warn where the cache has room for no chunk, which would look like a cache that does not
        work."""
        largest = int(self._snapshot.chunk_sizes.max(initial=0))
        if room_bytes < largest:
            self._warn(
                f"{option} leaves room for {room_bytes:,} bytes of chunks {where}, and the largest"
                f" chunk has {largest:,}: chunks larger than the room are not kept there"
            )

    def _warn_of_replaced(self, address: str) -> None:
        """Warn where this master took its rank from one at another address: two nodes may have been
        given the same rank. On the same machine it was this node's own master, which was killed."""
        if address and split_address(address).host != split_address(self._member.address).host:
            self._warn(
                f"this master has replaced another one of rank {self._rank}, at {address}: give"
                " each node a --rank of its own"
            )

    def _warn_of_higher_rank(self, found: Membership) -> None:
        """Warn where --world differs between nodes. They share the chunks all the same."""
        last = max((each.rank for each in found.members), default=0)
        if last >= self._world:
            self._warn(
                f"there is a node {last} in this task, and --world says {self._world} here: say the"
                " same --world on all nodes"
            )

    def _warn(self, text: str) -> None:
        """Log a warning, and report it to the process that starts this master."""
        log.warning("%s", text)
        daemons.report({"warning": text})

    def _bind(self) -> socket.socket:
        """The socket on which other masters reach this one. Raises UsageError."""
        request = self._request
        listen = listen_address(
            request.listen,
            request.advertise,
            rank=self._rank,
            world=self._world,
            peers=request.peers,
            url=parse_url(request.url),
        )
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
        """Register, serve, and leave at the end. Raises DieselError."""
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
        """Run the master until it ends; returns it, or None where it may not be a member any
        more."""
        me = LocalIdentity(
            rank=self._rank,
            instance=self._member.instance,
            task=self._name,
            version=self._snapshot.version,
            secret=first.secret,
            sizes=self._snapshot.chunk_sizes,
            certificate=self._certificate,
        )
        master = Master(
            me,
            self._member,
            self._snapshot,
            self._objects,
            self._registry,
            self._make_cache,
            world=self._world,
            oneshot=self._request.policy == "oneshot",
        )
        clients = local.LocalServer(master)
        is_over = False
        async with trio.open_nursery() as nursery:

            async def until_the_end(wait: Callable[[], Awaitable[object]]) -> None:
                nonlocal is_over
                await wait()
                is_over = True
                nursery.cancel_scope.cancel()

            nursery.start_soon(until_the_end, partial(_signalled, signals))
            await nursery.start(self._be_member, master, first, nursery.cancel_scope)
            self._clients.listen()
            nursery.start_soon(clients.serve, self._clients.socket)
            nursery.start_soon(_mark, self._clients.path)
            nursery.start_soon(
                until_the_end, partial(clients.wait_until_idle, self._request.idle_timeout_s)
            )
            log.info(
                "node %d of task %s is at %s: %d chunks of %s, version %d",
                self._rank, self._name.name, self._member.address, self._snapshot.chunk_count,
                self._snapshot.dataset, self._snapshot.version,
            )  # fmt: skip
            daemons.report({"ready": os.fspath(self._clients.path), "rank": self._rank})
        mark_ended(self._clients.path)
        self._clients.close()
        self._listener.close()
        return master if is_over else None

    async def _flush(self, master: Master, signals: Signals) -> None:
        """Write the chunks in memory to the disk, until time, a signal or another master ends
        that."""
        with trio.move_on_after(FLUSH_TIMEOUT_S):
            async with trio.open_nursery() as nursery:

                async def run_until(wait: Callable[[], Awaitable[object]]) -> None:
                    await wait()
                    nursery.cancel_scope.cancel()

                nursery.start_soon(run_until, partial(_signalled, signals))
                nursery.start_soon(run_until, partial(_succeeded, self._clients.path))
                nursery.start_soon(run_until, master.flush_to_disk)

    async def _be_member(
        self,
        master: Master,
        first: Membership,
        end: trio.CancelScope,
        *,
        task_status: trio.TaskStatus[None],
    ) -> None:
        await master.run(first, [self._listener], task_status=task_status)
        end.cancel()

    def _make_cache(self, fetch: Fetch) -> NodeCache:
        """The chunks that this node keeps."""
        policy = POLICIES[self._request.evict]
        return NodeCache(
            self._snapshot.identity,
            self._snapshot.chunk_ids,
            self._snapshot.chunk_sizes,
            memory_bytes=self._request.memory_bytes,
            policy=policy(),
            fetch=fetch,
            disk=self._disk,
            disk_policy=policy(),
        )


async def _mark(listen_path: Path) -> None:
    while True:
        await trio.sleep(ALIVE_MARK_S)
        mark_alive(listen_path)


async def _signalled(signals: Signals) -> None:
    async for number in signals:
        log.info("asked to end by signal %d", number)
        return


async def _succeeded(listen_path: Path) -> None:
    while not has_successor(listen_path):  # noqa: ASYNC110  # another process sends no event
        await trio.sleep(SUCCESSOR_POLL_S)
    log.info("another master of this node is starting: it gets the memory")
