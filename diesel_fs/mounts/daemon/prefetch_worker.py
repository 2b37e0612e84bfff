"""Runs the prefetch worker, the process of a mount that puts contents into the page cache.

The loop reports messages of the mount's server (`prefetch/link.py`) and opens of watched files to
the planner (`prefetch/planner.py`), asks it for a decision and carries the decision out
(`prefetch/pages/page_cache.py`).

The worker is a process of its own because each of its steps may wait: for the store, for the
server, or for the lock of a page that a READ in progress holds. If it dies, the mount goes on
without pushing.

Rules of concurrency:

- One thread runs the loop. It alone uses the planner, the page cache and the link. It handles a
  message as a whole, and carries a decision out and reports the result before it asks for the next
  decision.
- In one turn the loop reads all messages and opens, then does one piece of work, usually one
  decision. After a switch to another version, it first notifies the kernel of changed names and
  contents (`versions/invalidation.py`), and pushes nothing. Then it takes over pages of the version
  before, with one decision between two pieces if readers follow a plan.
- A push from a slow store waits for its contents in the thread "contents". Meanwhile the loop's
  thread answers requests of the control socket, which may overtake misses and forgotten files. So
  changes of plans, and opens, may come between a decision and its report. Everything else waits for
  the end of the push (`_later`): a switch never happens during a decision.
- Other threads read the store ahead (`cache/readers/coalescing_reader.py`), write order logs and
  send plans to the task's master. A process of its own drops pages, in the order of the calls
  (`prefetch/pages/advice_process.py`). None of them uses the planner.
"""

import gc
import logging
import mmap
import os
import select
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from ...cache.readers.coalescing_reader import ExtentBatch
from ...errors import DieselError
from ...format.entries import Kind
from ...format.image import Image
from ...format.snapshot.diff import SnapshotDiff
from ...format.snapshot.layout import MANY_EXTENTS, kinds
from ...format.snapshot.reader import Snapshot
from ...net.messages import Message, Value
from ...orders.plan import NO_ENTRIES, Entries
from ...peers.node.sealed_memory import raise_descriptor_limit
from ...peers.plan.sender import PlanSender, StreamProgress
from ..mountpoints.mountpoint import MountPresence
from ..options import MountRequest
from ..plans.commands import PlanCommands
from ..plans.control_wire import REQUESTS
from ..prefetch.decisions import Drop, FillPolicy, Idle, Push, Sample, UnitCosts
from ..prefetch.link import MountServerLink
from ..prefetch.pages.content_page_cache import STAGING_DIVISOR, ContentPageCache, ContentTarget
from ..prefetch.pages.page_cache import FusePageCache, PageCache, some_contents
from ..prefetch.planner import PrefetchPlanner
from ..sessions.protocol import invalidate_node
from ..sessions.push_status import PushStatusMap
from ..source import MountSource, map_snapshot, read_node_map
from ..versions.invalidation import (
    UNMOUNTED_ERRNOS,
    Nodes,
    invalidate_after_switch,
    invalidate_folders,
)
from .order_log_feed import OrderLogFeed
from .taken_over_pages import TakenOverPages

log = logging.getLogger("diesel.mount")

STATS_INTERVAL_S = 0.25
"""The least time between two reports to the server."""

IDLE_S_MAX = 5.0
"""The loop's longest wait."""

UNITS_AHEAD = 16
"""Pushes that are fetched ahead if the store is slow: 4 MiB each, as far as memory allows."""

MISSES_MAX = 512
"""If a message has more misses (READs that reached the mount), an even sample of them is used. Each
is looked up in every stream, and a flood of misses must not delay planned pushes."""

UNITS_SOON = 12
"""How many of each stream's next units (files of one push) are marked: the server holds READs of
their files."""

ANSWER_S = 0.2
"""The time between two looks for requests while a push waits for its contents."""

REPORTS = frozenset(("missed", "forgotten"))
"""Messages that requests of the control socket may overtake."""

QUIET_S_MAX, QUIET_DIVISOR = 0.1, 10
"""If the worker has nothing to do and all readers are far behind the claims, it looks at opens only
after this time, or a tenth of the time in which a reader comes to the end of the claims: one look
at ten opens costs hardly more than at one."""

BEGIN_DEADLINE_S = 10.0
"""How long to wait for the first message, which comes right after the descriptors."""


def run_prefetch_worker(request: MountRequest, source: MountSource, link: socket.socket) -> int:
    """Returns the exit code, at the end of the mount, or of the server behind `link`."""
    server = MountServerLink(link)
    try:
        server.send({"pid": os.getpid()})  # for the first statistics
        descriptors = server.receive_descriptors()
        if not descriptors:
            return 0  # a session without pushing
        device, *files = descriptors
        [begin, *early] = server.messages(BEGIN_DEADLINE_S)
        if begin.get("do") == "end":  # a signal came before the mount was ready
            return 0
        name = begin["device"]
        content = None
        if "content_node" in begin:  # a native mount
            raise_descriptor_limit()  # each file that is watched is open
            content = ContentTarget.open(files.pop(), _int_field(begin, "content_node"))
        push_bytes = _int_field(begin, "push_bytes")
        worker = PrefetchWorker(server, request, source, device, push_bytes, content)
        # Without local names: they would keep the first version in memory after a switch
        worker.switch_version(map_snapshot(files[0]), None, *_map_rest(files[1:]))
        for descriptor in files:  # all are mapped
            os.close(descriptor)
        try:
            worker.run(str(name), early)
        finally:
            worker.close()
    except EOFError:
        return 0
    except OSError as error:
        # The connection was ended, for example by `umount --force`, which reports the reason
        if error.errno not in UNMOUNTED_ERRNOS:
            raise
    return 0


def _map_rest(files: Sequence[int]) -> tuple[PushStatusMap, Image | None]:
    image = None
    if len(files) > 1:
        image = Image(memoryview(mmap.mmap(files[1], 0, prot=mmap.PROT_READ)), verify=False)
    return PushStatusMap(files[0]), image


def _int_field(message: Message, name: str) -> int:
    value = message[name]
    assert isinstance(value, int)
    return value


class PrefetchWorker:
    """`switch_version` sets the attributes that are declared here."""

    _snapshot: Snapshot
    _feed: OrderLogFeed
    _page_cache: PageCache
    _planner: PrefetchPlanner
    _plan_commands: PlanCommands
    _push_status: PushStatusMap
    _nodes: Nodes | None

    def __init__(
        self,
        server: MountServerLink,
        request: MountRequest,
        source: MountSource,
        device: int,
        push_bytes: int,
        content: ContentTarget | None,
    ) -> None:
        """`device` is a descriptor of the connection, `push_bytes` the memory for pages; `content`
        is None unless the mount is native."""
        self._server = server
        self._request = request
        self._source = source
        self._device = device
        self._push_bytes = push_bytes
        self._content = content
        self._failed = 0  # pushes
        self._invalidations: deque[Iterator[None]] = deque()  # to be sent to the kernel
        self._taken_over: TakenOverPages | None = None  # until all pages are taken over
        self._stats_changed = True  # since the statistics were last sent
        self._stats_sent_s = 0.0
        self._plan_sender: PlanSender | None = None  # to the task's master
        self._mountinfo = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        self._mounts_changed = False
        self._waiting = ThreadPoolExecutor(1, "contents")
        self._later: list[Message] = []  # came during a push, and wait for its end
        self._has_pushed = False  # a push has shown whether the store is slow

    def switch_version(
        self,
        snapshot: Snapshot,
        nodes: Nodes | None,
        push_status: PushStatusMap,
        image: Image | None,
    ) -> None:
        """Pushes `snapshot` from now on. `nodes` has the node of each entry; None: an entry's node
        is its index + 1. `image` is None unless the mount is native. Raises DieselError."""
        self._snapshot = snapshot
        self._feed = OrderLogFeed(self._request, self._source, snapshot, self._push_bytes)
        at, budget_bytes = self._request.mountpoint, self._push_bytes
        if image is None or self._content is None:
            self._page_cache = FusePageCache(at, snapshot, self._device, nodes)
        else:
            staging_bytes = budget_bytes // STAGING_DIVISOR
            budget_bytes -= staging_bytes
            self._page_cache = ContentPageCache(
                at, snapshot, self._device, image, self._content, staging_bytes, budget_bytes
            )
        self._planner = planner_for(
            snapshot, budget_bytes, self._request.policy, self._read_costs,
            keeps_important=self._request.task_options.evict == "importance",
        )  # fmt: skip
        self._plan_commands = PlanCommands(
            snapshot, self._planner, self._are_whole, predicts_early=self._feed.is_possible
        )
        if self._plan_sender is not None:
            self._plan_sender.close()
        self._plan_sender = self._source.plan_sender(snapshot)
        self._push_status = push_status
        self._nodes = nodes
        self._server.watch(self._page_cache.opens.descriptor)

    def run(self, device: str, early: Sequence[Message] = ()) -> None:
        """Works until the mount is unmounted, or the server sends "end". `early` are messages that
        have arrived already. Raises EOFError if the server has ended."""
        self._server.watch(self._mountinfo, select.POLLPRI)  # when anything is mounted or unmounted
        presence = MountPresence(device)
        presence.is_mounted()  # so that it knows the tree of a native mount
        wait_s = quiet_s = 0.0
        while True:
            messages = [*early, *self._later]
            self._later.clear()
            if messages or not wait_s:
                messages += self._server.messages(0.0)
            else:
                messages = self._server.messages(wait_s, quiet_s)
            early = ()
            self._read_opens(time.monotonic())  # opens came before the misses
            for message in messages:
                if message.get("do") == "end":
                    return
                self._handle_message(message)
                self._stats_changed = True
            now_s = time.monotonic()
            self._plan_commands.predict_next_epochs(now_s)
            self._mounts_changed |= self._mountinfo in self._server.ready
            if self._mounts_changed and not presence.is_mounted():
                return
            self._mounts_changed = False
            self._page_cache.set_planned(is_planned=self._planner.views.has_streams)
            if self._feed.is_possible and self._planner.views.has_streams:
                self._feed.follow(self._planner, self._push_status.log_addresses, now_s)
            if self._invalidations:
                wait_s = self._invalidate_some()
            elif self._taken_over is not None:
                if self._planner.views.has_streams:
                    self._act(now_s)  # readers of a plan do not wait
                wait_s = 0.0
                if self._taken_over.some():
                    self._stats_changed = True
                else:
                    self._end_take_over()
            else:
                wait_s = self._act(now_s)
                lead_s = self._planner.views.lead_s() if wait_s else 0.0
                quiet_s = min(lead_s / QUIET_DIVISOR, QUIET_S_MAX)
            self._push_status.set_wants_all_misses(each_miss=self._planner.wants_misses)
            self._page_cache.release_folders()
            self._send_stats(now_s)

    def close(self) -> None:
        """Afterwards the worker no longer keeps the mount busy."""
        self._waiting.shutdown(wait=False, cancel_futures=True)
        self._page_cache.close()
        self._feed.close()
        if self._plan_sender is not None:
            self._plan_sender.close()
        self._end_take_over()
        os.close(self._mountinfo)

    def _handle_message(self, message: Message) -> None:
        now_s = time.monotonic()
        do, packed = message.get("do"), message.get("entries")
        if do == "missed" and isinstance(packed, bytes):
            missed = np.frombuffer(packed, "<i8")
            self._page_cache.note_reads()
            # Some may be entries of the version before
            missed = missed[(missed >= 0) & (missed < len(self._snapshot))]
            if self._feed.is_possible:
                self._feed.note_late(np.unique(missed).astype(np.uint32))
            missed = missed[:: 1 + len(missed) // MISSES_MAX]
            if self._content is not None:
                # Files of several chunks come faster by READs, which the kernel sends ahead
                missed = missed[self._snapshot.columns.flags[missed] & MANY_EXTENTS == 0]
            for entry in missed.tolist():
                if not self._planner.resident([entry])[0] or self._page_cache.is_lost(entry):
                    self._planner.missed(entry, now_s, is_sure=self._content is None)
            return
        if do == "forgotten" and isinstance(packed, bytes):
            self._planner.forgotten(np.frombuffer(packed, "<i8"))
            return
        if do == "switch":
            self._switch(message)
            return
        if do == "names are old":
            self._invalidations.append(invalidate_folders(self._device, _folders_of(message)))
            return
        node = message.get("node")
        if do == "forget" and isinstance(node, int):  # of a list: its next READ must reach us
            with suppress(FileNotFoundError):  # the kernel does not know the list
                os.write(self._device, invalidate_node(node))
            answer: Message = {}
        else:
            self._read_opens(now_s)  # the answer may contain readers' positions
            answer = self._plan_commands.answer(message, now_s)
        if "id" in message:
            self._server.send({**answer, "id": message["id"]})

    def _switch(self, message: Message) -> None:
        is_native = self._content is not None
        file, shared, node_map, *rest = files = self._server.take_descriptors(3 + 2 * is_native)
        old, old_planner, old_page_cache = self._snapshot, self._planner, self._page_cache
        before = self._nodes
        snapshot = map_snapshot(file)
        nodes, same_path, unchanged = read_node_map(node_map, snapshot.entry_count)
        push_status, image = _map_rest([shared, *rest[:1]])
        old_content = self._content
        if old_content is not None:  # the new version may have another content file
            self._content = ContentTarget.open(files.pop(), _int_field(message, "content_node"))
        for descriptor in files:  # all are mapped
            os.close(descriptor)
        self._server.watch_no_more(old_page_cache.opens.descriptor)
        old_page_cache.retire()
        if old_content is not None:
            old_content.close()
        self._feed.close()
        self.switch_version(snapshot, nodes, push_status, image)
        self._source.keep_only(snapshot)
        diff = SnapshotDiff(old, snapshot, same_path, unchanged)
        was = self._page_cache.inherit(old_page_cache, diff)
        self._planner.inherit(old_planner, was)
        self._end_take_over()  # of the version before the last one
        is_left = (diff.unchanged >= 0) & (was < 0)
        is_left[is_left] = old_planner.resident_set.resident[diff.unchanged[is_left]]
        left = np.flatnonzero(is_left)
        self._taken_over = TakenOverPages(
            old_page_cache, left, diff.unchanged, self._page_cache, self._planner
        )
        if nodes is not None:
            if before is None:
                before = np.arange(1, old.entry_count + 1, dtype=np.uint64)
            self._invalidations.append(invalidate_after_switch(self._device, diff, before, nodes))
        self._invalidations.append(self._finish_switch(message["id"]))

    def _finish_switch(self, message_id: Value) -> Iterator[None]:
        """Answer the server, after all invalidations of the switch."""
        self._server.send({"id": message_id})
        self._stats_changed = True
        gc.collect()  # the old version has reference cycles, and its snapshot would stay mapped
        yield

    def _end_take_over(self) -> None:
        taken_over, self._taken_over = self._taken_over, None
        if taken_over is not None:
            taken_over.close()

    def _invalidate_some(self) -> float:
        """Returns the seconds to wait after it."""
        try:
            next(self._invalidations[0])
        except StopIteration:
            self._invalidations.popleft()
        except OSError:  # the mount has ended
            self._invalidations.clear()
        return 0.0

    def _read_opens(self, now_s: float) -> None:
        for entry in self._page_cache.opens.read():
            self._planner.opened(entry, now_s)
            self._stats_changed = True

    def _act(self, now_s: float) -> float:
        """Returns the seconds to wait after it."""
        match self._planner.next(now_s):
            case Push() as push:
                self._push(push)
            case Drop() as drop:
                self._page_cache.opens.unwatch(drop.markers.tolist())
                self._page_cache.drop(drop.entries, self._push_status.count_progress)
                self._planner.dropped(drop)
            case Sample(entries):
                self._push_status.count_progress()  # READs are held until the next push
                self._planner.sampled(entries, np.fromiter(map(self._is_resident, entries), bool))
            case Idle(until_s):
                self._mark_soon([NO_ENTRIES] if self._planner.waits_for_reader else None)
                if self._page_cache.tidy() or self._feed.read_late():
                    return 0.0
                left_s = IDLE_S_MAX if until_s is None else until_s - time.monotonic()
                return min(
                    max(left_s, 0.0), STATS_INTERVAL_S if self._stats_changed else IDLE_S_MAX
                )
        self._stats_changed = True
        return 0.0

    def _read_costs(self, units: Sequence[Entries]) -> Sequence[tuple[float, float]]:
        return self._feed.batches.read_costs(units)

    def _are_whole(self, entries: Sequence[int]) -> list[bool]:
        """Whether each of these files has all its pages in the page cache. A file of which READs
        have failed loses its pages, and does not count."""
        found = []
        cache, reads_failed = self._page_cache, self._push_status.reads_failed
        for entry in entries:
            try:
                has_failed = reads_failed and cache.drop_failed(entry)
                found.append(not has_failed and cache.is_whole(entry))
            except OSError:
                found.append(False)
        return found

    def _is_resident(self, entry: int) -> bool:
        try:
            return self._page_cache.resident_bytes(int(entry)) > 0
        except OSError:
            return False

    def _push(self, push: Push) -> None:
        self._mark_soon([push.entries], is_pushing=True)
        if not push.is_urgent:  # during an urgent push, reads ahead go on as they are
            self._feed.batches.prefetch([push.entries, *self._planner.upcoming(UNITS_AHEAD)])
        self._page_cache.opens.watch(push.markers.tolist())
        part_count, stored, failed = 0, [], False
        absent: list[int] = []
        try:
            for batch in self._contents(push.entries):
                self._page_cache.prepare(batch)
                pushed = self._without_held_reads(batch)
                absent += pushed.entries[self._page_cache.store(pushed)].tolist()
                self._push_status.count_progress()
                self._push_status.set_store_is_slow(is_slow=self._feed.batches.is_slow)
                part_count += len(batch.entries)
                stored.append(batch.entries)
        except (DieselError, OSError) as error:
            if isinstance(error, OSError) and error.errno in UNMOUNTED_ERRNOS:
                raise
            failed = True
            self._failed += 1
            log.error("cannot push %d files of chunk %d: %s", len(push.entries), push.chunk, error)
        self._has_pushed = True
        done: npt.NDArray[np.int64] | npt.NDArray[np.uint32] = push.entries
        if absent or part_count != len(push.entries):  # or a file has several parts
            done = np.setdiff1d(np.concatenate(stored), absent) if stored else NO_ENTRIES
        self._planner.pushed(push, done, absent, time.monotonic(), failed=failed)
        self._planner.set_store_is_slow(is_slow=self._feed.batches.is_slow)
        self._planner.memory.set_known_entries(self._page_cache.known_entries)

    def _mark_soon(self, first: list[Entries] | None, *, is_pushing: bool = False) -> None:
        """The server holds READs of these entries and the next units. None: nothing is pushed
        next."""
        if first is None:
            self._push_status.clear_soon()
            return
        soon = [*first, *self._planner.views.planned(UNITS_SOON)]
        is_slow = self._feed.batches.is_slow
        if self._content is not None and not self._feed.has_logs and not is_slow:
            # Files of many chunks, each pushed by a write of its own, come faster by READs, so the
            # server does not hold those. If the store is slow or there are order logs, it does:
            # otherwise each file would be read twice, for the READ and for the push.
            soon = [NO_ENTRIES, *(each for each in soon if _is_of_one_chunk(self._snapshot, each))]
        self._push_status.mark_soon(np.concatenate(soon))
        self._push_status.set_store_is_slow(is_slow=is_slow and is_pushing)

    def _contents(self, entries: Entries) -> Iterator[ExtentBatch]:
        """If contents take long, answers requests meanwhile. Raises DieselError."""
        batches = self._feed.batches.batches(entries)
        if self._has_pushed and not (self._feed.batches.is_slow or self._request.task_options):
            yield from batches
            return
        while True:
            coming = self._waiting.submit(next, batches, None)
            while not coming.done():
                with suppress(TimeoutError):
                    coming.exception(ANSWER_S)
                    break
                self._push_status.count_progress()  # so that the server goes on holding READs
                self._answer_requests()
            batch = coming.result()
            if batch is None:
                return
            yield batch

    def _answer_requests(self) -> None:
        """All messages but requests of the control socket wait for the end of the push."""
        for message in self._server.messages(0.0):
            is_next = all(each.get("do") in REPORTS for each in self._later)
            if is_next and message.get("do") in REQUESTS:
                self._handle_message(message)
            else:
                self._later.append(message)
        self._mounts_changed |= self._mountinfo in self._server.ready

    def _without_held_reads(self, batch: ExtentBatch) -> ExtentBatch:
        """Hands over contents to READs that the server holds, and pushes the rest of their files.
        Returns the batch without these files."""
        is_held = self._push_status.mark_now(batch.entries)
        if not is_held.any():
            return batch
        left, rest = [], []
        held = np.flatnonzero(is_held).tolist()
        for at in held:
            entry, start, content = batch.entries[at], int(batch.starts[at]), batch.contents[at]
            ranges = self._push_status.besides_held(int(entry), start, len(content))
            rest += [(entry, start + begin, content[begin:end]) for begin, end in ranges]
        if rest:  # before the READs get their bytes: readers want the rest next
            entries, starts, contents = zip(*rest, strict=True)
            self._page_cache.store(ExtentBatch(np.array(entries), np.array(starts), contents))
        for at in held:
            entry, start = int(batch.entries[at]), int(batch.starts[at])
            if not self._push_status.hand_over(entry, start, batch.contents[at]):
                left.append(entry)
        self._push_status.end_soon(np.array(left, np.int64))
        return some_contents(batch, np.flatnonzero(~is_held).tolist())

    def _stats(self) -> Message:
        plans = self._plan_commands.stats()
        store: dict[str, Value] = {**self._feed.batches.stats(), **self._source.cache_reads()}
        return {"pid": os.getpid(), **plans, "failed_pushes": self._failed, "store": store}

    def _send_stats(self, now_s: float) -> None:
        if self._stats_changed and now_s - self._stats_sent_s >= STATS_INTERVAL_S:
            self._stats_sent_s, self._stats_changed = now_s, False
            self._server.send(self._stats())
            if self._plan_sender is not None:
                self._plan_sender.set_streams(
                    {
                        name: StreamProgress(*progress)
                        for name, progress in self._planner.views.progress_of_streams().items()
                    },
                    self._planner.importances.take_chunk_values(),
                )


def _is_of_one_chunk(snapshot: Snapshot, entries: Entries) -> bool:
    chunks = snapshot.columns.chunk[entries]
    return len(chunks) > 0 and bool((chunks == chunks[0]).all())


def _folders_of(message: Message) -> dict[int, list[bytes]]:
    """The names in a message, by the node of their folder."""
    nodes, names = message["nodes"], message["names"]
    assert isinstance(nodes, list)
    assert isinstance(names, list)
    found: dict[int, list[bytes]] = {}
    for node, some in zip(nodes, names, strict=True):
        assert isinstance(node, int)
        assert isinstance(some, list)
        found[node] = [name for name in some if isinstance(name, bytes)]
    return found


def planner_for(
    snapshot: Snapshot,
    budget_bytes: int,
    policy: FillPolicy,
    costs: UnitCosts | None = None,
    *,
    keeps_important: bool = False,
) -> PrefetchPlanner:
    column = snapshot.columns
    offset = column.offset
    many = np.flatnonzero((column.flags & MANY_EXTENTS) != 0)
    if len(many):
        offset = offset.copy()
        offset[many] = column.extents["offset"][column.chunk[many]]
    return PrefetchPlanner(
        snapshot.chunk_of(range(snapshot.entry_count)),
        column.size.astype(np.int64),
        snapshot.chunk_count,
        budget_bytes=budget_bytes,
        policy=policy,
        offset=offset,
        is_file=kinds(column.flags) == Kind.FILE,
        costs=costs,
        keeps_important=keeps_important,
    )
