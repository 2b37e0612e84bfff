"""The counts, times and notes of a training command, from the messages of its hooks."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_NOTES_MAX = 5  # notes that are shown
_INTERVALS_MAX = 2000  # of one loop; if there are more, each two neighbours are joined

_WAITED_PART, _WAITED_S_MIN = 0.05, 1.0
"""A loop that waits for a smaller part of an epoch, or for less time, needs no other workers."""
_HEADROOM = 1.1  # workers that are just fast enough make the loop wait for each slow batch
_WORKERS_MAX = 64  # the most that are recommended


@dataclass(slots=True)
class Interval:
    """The times of a loop over a `DataLoader` between two of its messages."""

    epoch: int
    end_s: float
    """Seconds since the start of the command."""
    batches: int
    waited_s: float
    """The time in which the loop waited for batches."""
    computed_s: float
    """The time between a batch and the request for the next one."""

    @property
    def total_s(self) -> float:
        return self.waited_s + self.computed_s


@dataclass(frozen=True, slots=True)
class MeasuredWorkers:
    """What the workers of a loader have measured in one epoch (the hook's `pace.py`)."""

    workers: int
    at_once: int
    """How many workers may prepare batches at the same time."""
    cores: float
    batches: int
    fetch_s: float
    """For all batches, without the time in which workers waited for a processor."""
    cpu_s: float
    """The processors' part of `fetch_s`."""

    def advice(self, loop: Interval) -> str | None:
        """What the user should change, if anything. `loop`: the times of that epoch."""
        if self.workers > self.at_once:
            return (
                f"{self.workers} workers of a DataLoader are more than {self.cores:.3g} processors"
                f" can use, so {self.at_once} of them worked at a time:"
                f" num_workers={self.at_once} is enough and takes less memory"
            )
        is_short = loop.waited_s < max(_WAITED_S_MIN, _WAITED_PART * loop.total_s)
        # Otherwise the loop has waited for something else, such as the start of its workers
        is_theirs = 2 * self.fetch_s >= loop.waited_s * self.workers
        if is_short or not is_theirs or not self.batches or not loop.batches:
            return None
        batch_s, cpu_s = self.fetch_s / self.batches, self.cpu_s / self.batches
        step_s = loop.computed_s / loop.batches
        useful = max(int(self.cores * batch_s / cpu_s), 1) if cpu_s else _WORKERS_MAX
        enough = math.ceil(_HEADROOM * batch_s / step_s) if step_s else _WORKERS_MAX
        times = (
            f"a worker takes {batch_s:.3g} s for a batch, of which it computes {cpu_s:.3g} s,"
            f" and the loop takes {step_s:.3g} s"
        )
        if min(enough, useful) > self.workers:
            return (
                f"a loop waits for the {self.workers} workers of its DataLoader:"
                f" num_workers={min(enough, useful, _WORKERS_MAX)} would be enough ({times})"
            )
        if enough > self.workers:
            return (
                f"a loop waits for the {self.workers} workers of its DataLoader, and more would not"
                f" help: they keep {self.cores:.3g} processors busy ({times})"
            )
        return None


class LoopTimes:
    """The intervals of one loader, in the order of time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.intervals: list[Interval] = []
        self.measured: tuple[int, MeasuredWorkers] | None = None
        """By the workers, with the epoch; of the last epoch that had enough batches."""

    def note_measured(self, epoch: int, new: MeasuredWorkers) -> None:
        known = self.measured
        if known is None or epoch == known[0] or new.batches >= known[1].batches // 2:
            self.measured = epoch, new

    def advice(self) -> str | None:
        """What the user should change about the workers, if anything."""
        if self.measured is None:
            return None
        epoch, workers = self.measured
        times = next((each for each in self.epochs() if each.epoch == epoch), None)
        return None if times is None else workers.advice(times)

    def add(self, new: Interval) -> None:
        if new.batches or new.total_s:
            self.intervals.append(new)
        if len(self.intervals) > _INTERVALS_MAX:
            self.intervals = _halved(self.intervals)

    def epochs(self) -> list[Interval]:
        """The intervals, joined to one for each epoch."""
        found: dict[int, Interval] = {}
        for each in self.intervals:
            known = found.get(each.epoch)
            found[each.epoch] = each if known is None else _joined(known, each)
        return list(found.values())


def _joined(one: Interval, other: Interval) -> Interval:
    return Interval(
        one.epoch,
        other.end_s,
        one.batches + other.batches,
        one.waited_s + other.waited_s,
        one.computed_s + other.computed_s,
    )


def _halved(intervals: Sequence[Interval]) -> list[Interval]:
    """Join each two neighbouring intervals of the same epoch."""
    halved: list[Interval] = []
    is_pair = True
    for each in intervals:
        if not is_pair and halved[-1].epoch == each.epoch:
            halved[-1] = _joined(halved[-1], each)
            is_pair = True
        else:
            halved.append(each)
            is_pair = False
    return halved


@dataclass(slots=True)
class Summary:
    """The announcements and the times of a training command, and the notes for its user."""

    processes: int = 0
    """Python processes that loaded the hook."""
    epochs: int = 0
    """Epochs that loaders have begun, of datasets whose files can be planned."""
    planned_epochs: int = 0
    """Epochs of which at least one file was announced to a mount."""
    files: int = 0
    """Announced files."""
    loops: dict[str, LoopTimes] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    """How often each note came up."""
    show: Callable[[str], None] | None = None
    """Called with each new note, for the first `_NOTES_MAX` of them."""
    shown: set[str] = field(default_factory=set)
    """The notes that `show` was called with."""

    def note(self, text: str) -> None:
        self.notes[text] += 1
        if self.show is not None and text not in self.shown and len(self.shown) < _NOTES_MAX:
            self.shown.add(text)
            self.show(text)

    def add(self, stream: str, interval: Interval, measured: MeasuredWorkers | None = None) -> None:
        """Add an interval of the loader with this stream, and what its workers have measured in the
        epoch so far."""
        loop = self.loops.get(stream)
        if loop is None:
            process, _, loader = stream.partition(".")
            loop = self.loops[stream] = LoopTimes(f"process {process}, loader {loader}")
        loop.add(interval)
        if measured is not None:
            loop.note_measured(interval.epoch, measured)

    def total(self) -> Interval:
        """The sums over all loops. `epoch` and `end_s` have no meaning."""
        total = Interval(0, 0.0, 0, 0.0, 0.0)
        for loop in self.loops.values():
            for each in loop.intervals:
                total = _joined(total, each)
        return total

    def lines(self, *, again: bool = False) -> Sequence[str]:
        """The lines for the user at the end: the announcements, the time that the loops waited, and
        the notes; with `again` also the notes that were shown before."""
        lines = []
        if not self.processes:
            lines.append(
                "no Python process of the command could be joined: it has none, or runs it with"
                " -I, -E or -S, or without PYTHONPATH"
            )
        elif not self.epochs:
            lines.append("no DataLoader has read files in a known order: nothing was announced")
        elif not self.planned_epochs:
            lines.append(
                "no file that was read lies in a mount that takes plans: nothing was announced"
            )
        else:
            lines.append(
                f"announced {self.planned_epochs} of {self.epochs} epochs, {self.files:,} files"
            )
        total = self.total()
        if total.batches and total.total_s:
            lines.append(
                f"{total.batches:,} batches: waited {total.waited_s:.1f} s for data"
                f" ({total.waited_s / total.total_s:.1%} of {total.total_s:.1f} s)"
            )
        notes = Counter(
            {text: count for text, count in self.notes.items() if again or text not in self.shown}
        )
        notes.update(advice for loop in self.loops.values() if (advice := loop.advice()))
        shown = notes.most_common(_NOTES_MAX)
        lines += [text + (f" ({count} times)" if count > 1 else "") for text, count in shown]
        if len(notes) > len(shown):
            lines.append(f"and {len(notes) - len(shown)} more notes")
        return lines
