"""The program that a master is: from a request on stdin to the end of the task on this node.

Owned here: what a master is wired from, its start in the order in which things can fail, and its
end: asked to (SIGTERM, SIGINT), used by nobody any more, or a newer master has its rank. Not owned:
starting it (`launch.py`), all that it does meanwhile. One trio loop.

Asked to end, or deserted, it first makes place for another master of this node, and leaves the
task; then it brings what it has in memory to its disk. That ends after a while, and at once where
another master comes, who is to have the memory, or where it is asked to end again.

It reports on stdout, one JSON object a line: its process number, then that it is ready or what went
wrong. Where it is killed, its registration ends by its time, and its socket is found dead.
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
from ..storage.objects.cloud import direct as clouds
from ..system import daemons
from ..urls import parse_url
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
"""How long the end may wait for the registration to be ended; it ends by its time, too."""

FLUSH_TIMEOUT_S = 20.0
"""How long it may take to keep what is in memory: SLURM kills 30 s after it has asked."""

SUCCESSOR_POLL_S = 0.1
"""Between looks for another master meanwhile."""

_BACKLOG = 256

Signals = AsyncIterator[int]


def main() -> int:
    """Be a master, as the request on stdin says. The exit code."""
    clouds.open_buckets_directly()
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
        log.exception("the master fails")
        daemons.report(error_message(DieselError("the master fails", advice="see its log")))
        return DieselError.exit_code
    return 0


class _Daemon:
    """A master with all that it needs; whatever can fail at the start does so here."""

    def __init__(self, request: TaskRequest, stack: ExitStack) -> None:
        """`stack` closes what is opened. Raises DieselError."""
        self._request = request
        self._name = request.name
        self._rank, self._world = resolve_node(os.environ, request.rank, request.world)
        if request.evict not in POLICIES:
            raise UsageError(f"bad --evict {request.evict!r}: one of {', '.join(POLICIES)}")
        repository = open_repository(request.url, request.credentials)
        stack.callback(repository.close)
        self._objects = repository.objects
        self._snapshot = same_view(  # its readers have just fetched it
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
        self._listener = self._bound()
        stack.callback(self._listener.close)
        host, port = self._listener.getsockname()[:2]
        self._member = Member(
            rank=self._rank,
            instance=secrets.token_bytes(INSTANCE_BYTES),
            address=advertised_address(request.advertise, host, port),
            version=self._snapshot.version,
            certificate=self._certificate.digest if self._certificate else b"",
            has_key_file=key is not None,
        )

    def _opened_disk(self) -> DiskTier | None:
        if not self._request.cache_dir:
            return None
        try:
            place = prepare_cache_folder(Path(self._request.cache_dir), self._objects)
        except NoSpaceError as error:  # a full disk is a smaller cache
            self._warn(f"{error.message}: this node keeps nothing on a disk")
            return None
        shelf = DiskTier(place, self._objects.store_id, self._request.cache_bytes or None)
        if shelf.read_only_reason:
            daemons.report({"warning": shelf.read_only_reason})  # the log has it
        else:
            self._warn_of_little(shelf.limit_bytes, "--cache-size", "on the disk")
        return shelf

    def _warn_of_little(self, room_bytes: int, option: str, where: str) -> None:
        """Room for no chunk looks like a cache that does not work."""
        largest = int(self._snapshot.chunk_sizes.max(initial=0))
        if room_bytes < largest:
            self._warn(
                f"{option} leaves room for {room_bytes:,} bytes of chunks {where}, and the largest"
                f" has {largest:,}: such are not kept there"
            )

    def _warn_of_another(self, address: str) -> None:
        """The other master is told that it is over; who has started this one should know, too. On
        the same machine it was this node's, and has been killed."""
        if address and split_address(address)[0] != split_address(self._member.address)[0]:
            self._warn(
                f"this master has taken the place of another one of rank {self._rank}, at"
                f" {address}: give each node a --rank of its own"
            )

    def _warn_of_more(self, found: Membership) -> None:
        """Nodes that count differently share the chunks all the same."""
        last = max((each.rank for each in found.members), default=0)
        if last >= self._world:
            self._warn(
                f"there is a node {last} in this task, and --world says {self._world} here: say the"
                " same --world on all nodes"
            )

    def _warn(self, text: str) -> None:
        """Also those who have started it."""
        log.warning("%s", text)
        daemons.report({"warning": text})

    def _bound(self) -> socket.socket:
        request = self._request
        host, port = listen_address(
            request.listen,
            request.advertise,
            rank=self._rank,
            world=self._world,
            peers=request.peers,
            url=parse_url(request.url),
        )
        try:
            return socket.create_server(
                (host, port),
                family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                backlog=_BACKLOG,
            )
        except OSError as error:
            raise UsageError(
                f"cannot listen for other nodes on {host}:{port}: {os.strerror(error.errno or 0)}",
                advice="name another address or port by --listen",
            ) from error

    async def run(self) -> None:
        """Register, serve, and leave at the end. Raises DieselError."""
        first = await trio.to_thread.run_sync(self._registry.renew, self._member)
        self._warn_of_another(first.replaced_address)
        self._warn_of_more(first)
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            try:
                master = await self._serve(first, signals)
            finally:
                with trio.move_on_after(LEAVE_S, shield=True), suppress(DieselError):
                    await trio.to_thread.run_sync(
                        self._registry.leave, self._member, abandon_on_cancel=True
                    )
            if master is not None and self._disk is not None:
                await self._keep(master, signals)

    async def _serve(self, first: Membership, signals: Signals) -> Master | None:
        """The master, when it is over; None where it may not be one any more."""
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
            self._tiers,
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

    async def _keep(self, master: Master, signals: Signals) -> None:
        """What is in memory comes to the disk, as long as nobody minds."""
        with trio.move_on_after(FLUSH_TIMEOUT_S):
            async with trio.open_nursery() as nursery:

                async def until(wait: Callable[[], Awaitable[object]]) -> None:
                    await wait()
                    nursery.cancel_scope.cancel()

                nursery.start_soon(until, partial(_signalled, signals))
                nursery.start_soon(until, partial(_followed, self._clients.path))
                await master.flush_to_disk()
                nursery.cancel_scope.cancel()

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

    def _tiers(self, fetch: Fetch) -> NodeCache:
        """What this node keeps chunks in."""
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


async def _mark(place: Path) -> None:
    while True:
        await trio.sleep(ALIVE_MARK_S)
        mark_alive(place)


async def _signalled(signals: Signals) -> None:
    async for number in signals:
        log.info("asked to end by signal %d", number)
        return


async def _followed(place: Path) -> None:
    while not has_successor(place):  # noqa: ASYNC110  # another process tells nobody
        await trio.sleep(SUCCESSOR_POLL_S)
    log.info("another master of this node comes")
