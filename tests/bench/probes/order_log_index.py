"""Measures the index of an order log, without contents: FOLDER FILES BYTES build|write|load.

`build` makes the log of a next epoch, as when an epoch begins; `write` leaves the headers of a
whole log in the folder's cache, in a file with holes in place of contents; `load` takes that log
over, as after a crash. Only the mount's snapshot and the orders are in memory before.
"""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from uuid import UUID

import numpy as np

from diesel_fs.cache.disk.folder import CacheFolder
from diesel_fs.cache.disk.logs import OrderLogFiles
from diesel_fs.cache.disk.marker import prepare_cache_folder
from diesel_fs.cache.order_logs.layout import LogCut, LogIdentity, LogLayout
from diesel_fs.cache.order_logs.logs import OrderLogs
from diesel_fs.cache.order_logs.streams import LogPlan
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.orders.plan import Entries

IDENTITY, STORE, VERSION, SIGMA = UUID(int=1), UUID(int=2), 1, 0.5
LIMIT_BYTES = 1 << 45


def run(folder: str, files: int, total_bytes: int, what: str) -> dict[str, float]:
    drawn = np.random.default_rng(0).lognormal(0.0, SIGMA, files)
    size = np.maximum(drawn / drawn.sum() * total_bytes, 1).astype(np.uint64)
    columns = SimpleNamespace(
        size=size, flags=np.zeros(files, np.uint32), checksum=np.zeros(files, np.uint64)
    )
    snapshot = SimpleNamespace(identity=IDENTITY, version=VERSION, columns=columns)
    orders: list[Entries] = [
        np.random.default_rng(epoch).permutation(files).astype(np.uint32) for epoch in (0, 1)
    ]
    cache = CacheFolder(prepare_cache_folder(Path(folder)), STORE, LIMIT_BYTES)
    log_files = OrderLogFiles(cache, IDENTITY)
    if what == "write":
        identity = LogIdentity.of(IDENTITY, VERSION, orders[1])
        cut = LogCut(orders[1], size, np.ones(files, np.bool_))
        layout = LogLayout(cut, cut.by_arrival(orders[0]), 1 << 62)
        file = log_files.open(identity.file_name)
        for segment in range(layout.segments):
            os.pwrite(file, layout.header(segment, identity), int(layout.start[segment]))
        return {"bytes": float(layout.total_bytes)}
    logs = OrderLogs(cast("Snapshot", snapshot), log_files)
    plan = LogPlan("train", *orders) if what == "build" else LogPlan("train", orders[1], None)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # a new peak from here on
    before_bytes = _peak_bytes()
    start_s = time.monotonic()
    logs.set_plan([plan])
    logs.settle()
    seconds = time.monotonic() - start_s
    found = {"seconds": seconds, "bytes": float(_peak_bytes() - before_bytes)}
    assert what == "build" or logs.holds(orders[1]), "the log was not taken over"
    return found


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    folder, files, total_bytes, what = sys.argv[1:]
    print(json.dumps(run(folder, int(files), int(total_bytes), what)))
    sys.stdout.flush()
    os._exit(0)  # the log stays
