"""Builds the parts of one stream without a planner: files of one page, 64 in a chunk."""

import numpy as np

from diesel_fs.mounts.prefetch.streams.stream_order import StreamOrder
from diesel_fs.mounts.prefetch.streams.stream_tracker import StreamTracker
from diesel_fs.mounts.prefetch.streams.units import PAGE_BYTES, Columns
from diesel_fs.orders.plan import Stream

from .simulated_kernel import stream

FILES = 20_000
COLUMNS = Columns(
    np.arange(FILES, dtype=np.int32) // 64, np.ones(FILES, np.uint32), -(-FILES // 64)
)


def order_of(*orders: list[int], lag: int = 0, tentative: bool = False) -> StreamOrder:
    """The order of a stream with these epochs, without a share of the memory."""
    return StreamOrder(COLUMNS, stream("a", *orders, lag=lag, tentative=tentative))


def tracker_of(announced: Stream, share_files: int = FILES) -> StreamTracker:
    """The tracker of a stream with memory for `share_files` files."""
    tracker = StreamTracker.of(COLUMNS, announced, 0.0)
    tracker.give_share(share_files * PAGE_BYTES)
    return tracker


def claim_next(tracker: StreamTracker, share_files: int = FILES) -> list[int]:
    """Claim the next unit. Returns its entries."""
    assert tracker.units.frontier(share_files * PAGE_BYTES) is not None
    unit = tracker.units.peek()
    tracker.units.claim(unit)
    entries: list[int] = unit.entries.tolist()
    return entries
