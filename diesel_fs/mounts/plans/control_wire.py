"""Packs and parses the fields of plans, and has the limits of the control socket. Pure.

CONTROL.md describes the messages. `net/messages.py` frames and decodes them.
"""

import numpy as np
import numpy.typing as npt

from ...cache.policies.importance import check_importances
from ...errors import UsageError
from ...format.snapshot.reader import ROOT_INDEX, Snapshot
from ...net.messages import Fields, Message
from ...orders.computed import ComputedOrder
from ...orders.plan import EPOCHS_MAX, EntryOrder, Epoch
from ...orders.shuffle import GROUP_SIZE_DEFAULT, WORLD_MAX

PROTOCOL = 1

REQUESTS = frozenset(
    ("announce", "extend", "replace", "withdraw", "progress", "value", "resident", "check", "stats")
)

FRAME_BYTES_MAX = 8 << 20
"""2 million entries. Longer epochs are sent in parts (`extend`). While the mount's server receives
such a frame, it cannot answer the kernel for 10 ms; for a frame of 32 MiB it would be 400 ms."""

HELLO_BYTES_MAX = 4096

ENTRIES_WIDTHS = (4, 8)  # bytes of an entry's index
CHECK_ENTRIES_MAX = 4096
"""The prefetch worker opens each of these entries, which takes about 50 ms in all, and pushes
nothing meanwhile."""

ENTRIES_PER_FRAME = 1 << 20
"""With 4 bytes each, these entries fill half of a frame."""

VALUES_PER_FRAME = ENTRIES_PER_FRAME // 2
"""The same with a value of 4 bytes for each entry."""


def parse_entries(fields: Fields) -> npt.NDArray[np.int64] | npt.NDArray[np.uint32]:
    """Parse the fields `entries` and `width`. Raises UsageError."""
    width = fields.integer("width", 4)
    given = fields.octets("entries")
    if width not in ENTRIES_WIDTHS or len(given) % width:
        fields.bad("entries", "it is whole numbers of 4 or 8 bytes each")
    entries = np.frombuffer(given, "<i4" if width == 4 else "<i8")
    if len(entries) and int(entries.min()) < 0:
        fields.bad("entries", "none is below 0")
    return entries.astype(np.uint32) if width == 4 else entries


def parse_importances(fields: Fields, count: int) -> npt.NDArray[np.float32]:
    """The importance of `count` entries: one number for all in the field `importance`, or one for
    each in `importances`. Raises UsageError for NaN, infinite and negative numbers."""
    if "importances" not in fields:
        found = np.full(count, fields.number("importance"), np.float64).astype(np.float32)
    else:
        given = fields.octets("importances")
        if len(given) != 4 * count:
            fields.bad("importances", f"it has 4 bytes for each of {count} entries")
        found = np.frombuffer(given, "<f4").astype(np.float32)
    check_importances(found)
    return found


def pack_entries(entries: EntryOrder) -> Message:
    """The fields for `parse_entries`. Raises UsageError unless the entries are one row of numbers
    from 0 to 2^31 - 1."""
    row = np.asarray(entries)
    if row.ndim != 1 or (len(row) and row.dtype.kind not in "iu"):
        raise UsageError("entries are one row of whole numbers")
    if len(row) and not 0 <= int(row.min()) <= int(row.max()) < 1 << 31:
        raise UsageError("an entry index is 0 to 2^31 - 1")
    return {"entries": row.astype("<i4").tobytes(), "width": 4}


def parse_epoch(fields: Fields, snapshot: Snapshot) -> Epoch:
    """An epoch from its entries, or from the parameters of a shuffle, whose order is computed here.
    Raises UsageError."""
    number = fields.integer("epoch")
    exact = fields.flag("exact", True)
    if "kind" not in fields:
        entries = parse_entries(fields)
        packed = fields.octets("bounds") if "bounds" in fields else None
        if packed is not None and len(packed) % 8:
            raise UsageError("bounds are whole numbers of 8 bytes each")
        bounds = None if packed is None else np.frombuffer(packed, "<i8")
        fields.end()
        # `Epoch` converts the arrays
        return Epoch(number, entries, exact, bounds)  # type: ignore[arg-type]
    kind = fields.text("kind")
    seed = fields.integer("seed")
    group_size = fields.integer("group_size", GROUP_SIZE_DEFAULT, low=1)
    world = fields.integer("world", 1, low=1, high=WORLD_MAX)
    rank = fields.integer("rank", 0, high=world - 1)
    drop_last = fields.flag("drop_last", False)
    below = fields.integer("below", ROOT_INDEX, high=max(len(snapshot) - 1, 0))
    fields.end()
    if kind not in ("chunk", "full"):
        raise UsageError(f"bad kind of order {kind[:64]!r}: it is chunk or full")
    if kind == "full":
        group_size = max(snapshot.chunk_count, 1)
    computed = ComputedOrder(seed, number, group_size, rank, world, drop_last, below)
    order = computed.entries(snapshot)
    return Epoch(number, order, exact, computed=computed)  # type: ignore[arg-type]


def parse_epochs(fields: Fields, snapshot: Snapshot) -> list[Epoch]:
    """Raises UsageError."""
    return [parse_epoch(each, snapshot) for each in fields.maps("epochs", EPOCHS_MAX)]
