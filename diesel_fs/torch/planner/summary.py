"""The counts, times and notes of a training command, from the messages of its hooks."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_NOTES_MAX = 5  # notes that are shown
_INTERVALS_MAX = 2000  # of one loop; if there are more, each two neighbours are joined


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


class LoopTimes:
    """The intervals of one loader, in the order of time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.intervals: list[Interval] = []

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

    def add(self, stream: str, interval: Interval) -> None:
        """Add an interval of the loader with this stream."""
        loop = self.loops.get(stream)
        if loop is None:
            process, _, loader = stream.partition(".")
            loop = self.loops[stream] = LoopTimes(f"process {process}, loader {loader}")
        loop.add(interval)

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
            lines.append("no file that was read lies in a mount: nothing was announced")
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
        shown = notes.most_common(_NOTES_MAX)
        lines += [text + (f" ({count} times)" if count > 1 else "") for text, count in shown]
        if len(notes) > len(shown):
            lines.append(f"and {len(notes) - len(shown)} more notes")
        return lines
