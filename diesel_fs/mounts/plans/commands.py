"""Carries out the messages that make and change plans, on a `PrefetchPlanner`.

The messages come from the control socket (CONTROL.md lists them) and from the mount's own server,
which reports the lists of files that programs read (`list_plans.py`) and switches versions. A
**stream** is one reader with the epochs that it will read; it is **tentative** until the reader is
seen to follow the order. All readers of one list, in any epoch, are one stream here; its next epoch
is announced when half of the last one has been read.

Only the prefetch worker's thread calls this. Drawing an order of a million files takes it 0.3 s.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ...errors import ConflictError, DieselError, UsageError
from ...format.snapshot.reader import Snapshot
from ...net.messages import Fields, Message, Value, error_message
from ...orders.path_lists import ListName
from ...orders.plan import EPOCH_ENTRIES_MAX, Epoch, Stream
from ..prefetch.decisions import StreamStats
from ..prefetch.planner import PrefetchPlanner
from .control_wire import (
    CHECK_ENTRIES_MAX,
    parse_entries,
    parse_epoch,
    parse_epochs,
    parse_importances,
)

LIST_STREAMS_MAX = 16
"""For a further list, the list that was read longest ago loses its stream. So most of the 64
streams are left for the control socket."""

JOB_NAME_MAX, BENEFIT_MAX = 64, 1e3

FINISHED_S = 60.0
"""A list's stream that was read to its end is withdrawn, and gives up its memory, unless its next
epoch begins within this time."""

PREDICT_INTERVAL_S = 1.0
"""The least time between two checks of the streams of lists."""

PREDICT_ENTRIES_MIN = 4096
"""Unless `predicts_early`, the next epoch is announced ahead only if an epoch has at least this
many files. Shorter ones begin fast without that, and an opened file could belong to either."""

PREDICT_FROM_DIVISOR = 2
"""Unless `predicts_early`, the next epoch is announced once half of the current one was read."""


@dataclass(slots=True)
class _ListStream:
    name: ListName  # of the last announced epoch
    is_predicted: bool  # no program has read the list of that epoch yet
    finished_s: float = math.inf  # when all epochs were first seen to be read


class PlanCommands:
    def __init__(
        self,
        snapshot: Snapshot,
        planner: PrefetchPlanner,
        are_whole: Callable[[Sequence[int]], Sequence[bool]] | None = None,
        *,
        predicts_early: bool = False,
    ) -> None:
        """`are_whole` returns which entries are whole in the page cache; without it, all pushed
        entries count as whole. With `predicts_early`, the next epoch of a list is announced as soon
        as its reader has read a file."""
        self._predicts_early = predicts_early
        self._snapshot = snapshot
        self._planner = planner
        self._are_whole = are_whole
        self._is_frozen = False  # the mount is about to switch to another version
        self._lists: OrderedDict[str, _ListStream] = OrderedDict()
        self._checked_s = 0.0  # by `predict_next_epochs`
        self._handlers: dict[str, Callable[[Fields, float], Message]] = {
            "announce": self._announce,
            "extend": self._extend,
            "replace": self._replace,
            "withdraw": self._withdraw,
            "progress": self._progress,
            "value": self._value,
            "resident": self._resident,
            "check": self._check,
            "stats": self._stats,
            "list read": self._list_read,
            "list looked up": self._list_looked_up,
            "running": self._running,
            "hold plans": self._freeze,
            "let plans": self._unfreeze,
        }

    def answer(self, message: Message, now_s: float) -> Message:
        """Returns the result, or the fields `error`, `message` and `advice`."""
        try:
            fields = Fields(message, "a message")
            do = fields.text("do")
            handler = self._handlers.get(do)
            if handler is None:
                raise UsageError(f"no request {do[:64]!r}")
            if "id" in fields:  # the link to the worker adds it
                fields.integer("id")
            return handler(fields, now_s)
        except DieselError as error:
            return error_message(error)

    # switching to another version -----------------------------------------------------------------

    def _running(self, fields: Fields, now_s: float) -> Message:
        """Answers with the streams that are being read; a switch of versions waits for them."""
        fields.end()
        return {"running": [*self._planner.views.running(now_s)]}

    def _freeze(self, fields: Fields, now_s: float) -> Message:
        """If no stream is being read, plans are refused until `_unfreeze`. Answers as
        `_running`."""
        running = self._running(fields, now_s)
        self._is_frozen = not running["running"]
        return running

    def _unfreeze(self, fields: Fields, now_s: float) -> Message:
        fields.end()
        self._is_frozen = False
        return {}

    # requests of the control socket ---------------------------------------------------------------

    def _announce(self, fields: Fields, now_s: float) -> Message:
        name = self._stream_field(fields)
        tentative = fields.flag("tentative", False)
        lag = fields.integer("lag_entries", 0, high=EPOCH_ENTRIES_MAX)
        epochs = parse_epochs(fields, self._snapshot)
        fields.end()
        self._planner.streams.announce(Stream(name, tuple(epochs), tentative, lag), now_s)
        self._lists.pop(name, None)
        return {"entries": sum(map(len, epochs))}

    def _extend(self, fields: Fields, now_s: float) -> Message:
        name = self._stream_field(fields)
        epochs = parse_epochs(fields, self._snapshot)
        fields.end()
        self._planner.streams.extend(name, epochs)
        return {"entries": sum(map(len, epochs))}

    def _replace(self, fields: Fields, now_s: float) -> Message:
        name = self._stream_field(fields)
        position = fields.integer("position", 0, high=EPOCH_ENTRIES_MAX)
        epoch = parse_epoch(fields, self._snapshot)
        self._planner.streams.replace(name, epoch, position)
        return {"entries": len(epoch)}

    def _withdraw(self, fields: Fields, now_s: float) -> Message:
        name = fields.text("stream")
        fields.end()
        self._planner.streams.withdraw(name)
        self._lists.pop(name, None)
        return {}

    def _progress(self, fields: Fields, now_s: float) -> Message:
        name = fields.text("stream")
        position = fields.integer("position")
        epoch = fields.integer("epoch") if "epoch" in fields else None
        fields.end()
        self._planner.streams.progress(name, position, now_s, epoch)
        return {}

    def _value(self, fields: Fields, now_s: float) -> Message:
        self._check_version(fields)
        entries = parse_entries(fields)
        importances = parse_importances(fields, len(entries))
        more = fields.flag("more", False)
        job = fields.text("job") if "job" in fields else ""
        benefit = fields.number("benefit") if "benefit" in fields else 1.0
        substitutes = fields.flag("substitutes", False)
        fields.end()
        if len(job) > JOB_NAME_MAX or not 0 <= benefit <= BENEFIT_MAX:
            raise UsageError(
                f"bad job {job[:64]!r} or benefit {benefit}: a name has at most {JOB_NAME_MAX}"
                f" characters, and a benefit is 0 to {BENEFIT_MAX:g}"
            )
        jobs = self._planner.importances.set(
            entries, importances, more=more, job=job, benefit=benefit, substitutes=substitutes
        )
        return {"jobs": jobs}

    def _resident(self, fields: Fields, now_s: float) -> Message:
        self._check_version(fields)
        entries = parse_entries(fields)
        fields.end()
        return _bitmap(self._planner.resident(entries))

    def _check(self, fields: Fields, now_s: float) -> Message:
        self._check_version(fields)
        entries = parse_entries(fields)
        fields.end()
        if len(entries) > CHECK_ENTRIES_MAX:
            raise UsageError(f"{len(entries)} entries to check (at most {CHECK_ENTRIES_MAX})")
        doubtful = self._planner.unconfirmed(entries)
        if self._are_whole is not None and len(doubtful):
            is_there = np.array(self._are_whole(doubtful.tolist()), np.bool_)
            self._planner.forgotten(doubtful[~is_there])
        return _bitmap(self._planner.resident(entries))

    def _stats(self, fields: Fields, now_s: float) -> Message:
        fields.end()
        return {"residency": self.stats()}

    def stats(self) -> dict[str, Value]:
        return {**self._planner.stats()}  # type: ignore[dict-item]  # lists of TypedDicts

    def _stream_field(self, fields: Fields) -> str:
        self._check_version(fields)
        return fields.text("stream")

    def _check_version(self, fields: Fields) -> None:
        """Raises ConflictError unless a message is for this version: indices differ in others."""
        identity, version = fields.text("identity"), fields.integer("version")
        own = self._snapshot
        if self._is_frozen:
            raise ConflictError(
                f"the mount is switching to another version of {own.dataset}",
                advice="ask again in a moment, with a plan for that version",
            )
        if identity != str(own.identity):
            raise ConflictError(
                f"the plan is for the dataset {identity[:64]}, the mount shows {own.identity}"
                f" ({own.dataset})"
            )
        if version != own.version:
            raise ConflictError(
                f"the plan is for version {version} of {own.dataset}, the mount shows"
                f" {own.version}",
                advice="make it from .diesel/snapshot of the mount",
            )

    # lists that programs read ---------------------------------------------------------------------

    def _list_read(self, fields: Fields, now_s: float) -> Message:
        """A program has begun to read a list: its order becomes a tentative stream."""
        stream, name = fields.text("stream"), _list_name(fields)
        fields.end()
        known = self._lists.get(stream)
        stats = self._planner.views.stream_stats(stream)
        if known is None or stats is None or not self._continues(known, stats, name):
            self._make_room(stream)
            plan = Stream(stream, (self._epoch(name, exact=True),), tentative=True)
            self._planner.streams.announce(plan, now_s)
        elif name.epoch > known.name.epoch:
            self._planner.streams.extend(stream, [self._epoch(name, exact=True)])
        else:
            self._lists.move_to_end(stream)
            known.is_predicted = known.is_predicted and name.epoch != known.name.epoch
            return {}
        self._lists[stream] = _ListStream(name, is_predicted=False)
        self._lists.move_to_end(stream)
        return {}

    def _continues(self, known: _ListStream, stats: StreamStats, name: ListName) -> bool:
        """Whether a list belongs to an epoch that the stream's reader is in, or will be in next."""
        if replace(known.name, epoch=name.epoch) != name:
            return False
        last = known.name.epoch
        return name.epoch == last + 1 or 0 <= stats["epoch"] <= name.epoch <= last

    def _list_looked_up(self, fields: Fields, now_s: float) -> Message:
        """Answers with the epoch that a list's reader is in; with the next one if the reader has
        read all announced ones; with -1 if it is unknown."""
        stream = fields.text("stream")
        fields.end()
        known, stats = self._lists.get(stream), self._planner.views.stream_stats(stream)
        if known is None or (stats is None and known.finished_s == math.inf):
            return {"epoch": -1}
        if stats is None or stats["epoch"] < 0:
            return {"epoch": known.name.epoch + 1}
        return {"epoch": stats["epoch"]}

    def predict_next_epochs(self, now_s: float) -> None:
        """Announces next epochs of lists, and withdraws streams that were read to their end
        `FINISHED_S` ago. It is cheap: the worker calls it in each turn of its loop."""
        if not self._lists or now_s - self._checked_s < PREDICT_INTERVAL_S:
            return
        self._checked_s = now_s
        for stream, known in tuple(self._lists.items()):
            stats = self._planner.views.stream_stats(stream)
            if stats is None:
                if known.finished_s == math.inf:  # withdrawn, as no reader followed it
                    del self._lists[stream]
            elif stats["epoch"] < 0:
                known.finished_s = min(known.finished_s, now_s)
                if now_s - known.finished_s >= FINISHED_S:
                    self._planner.streams.withdraw(stream)
            elif (
                not known.is_predicted
                and (stats["length"] >= PREDICT_ENTRIES_MIN or self._predicts_early)
                and not stats["tentative"]
                and stats["epoch"] == known.name.epoch
                and (
                    PREDICT_FROM_DIVISOR * stats["position"] >= stats["length"]
                    or self._predicts_early
                )
            ):
                following = replace(known.name, epoch=known.name.epoch + 1)
                try:
                    self._planner.streams.extend(stream, [self._epoch(following, exact=False)])
                    self._lists[stream] = _ListStream(following, is_predicted=True)
                except UsageError:  # the plan is full: the epoch begins unannounced
                    known.is_predicted = True

    def _epoch(self, name: ListName, *, exact: bool) -> Epoch:
        entries = name.order(self._snapshot)
        return Epoch(name.epoch, entries, exact, computed=name.computed)  # type: ignore[arg-type]  # it converts

    def _make_room(self, stream: str) -> None:
        self._lists.pop(stream, None)
        while len(self._lists) >= LIST_STREAMS_MAX:
            oldest, _ = self._lists.popitem(last=False)
            if self._planner.views.stream_stats(oldest) is not None:
                self._planner.streams.withdraw(oldest)


def _bitmap(mask: npt.NDArray[np.bool_]) -> Message:
    return {"count": len(mask), "bitmap": np.packbits(mask, bitorder="little").tobytes()}


def _list_name(fields: Fields) -> ListName:
    name = ListName.parse(fields.text("list").encode("ascii", "replace"))
    if name is None:
        raise UsageError("a message: bad 'list': it is not the name of a list")
    return name
