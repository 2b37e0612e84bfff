"""Makes the contents of files resident in the kernel's page cache before a reader asks for them.

The package serves the *prefetch worker* (`mounts/prefetch_worker.py`), a process of each mount by
the kernel session. It promises that contents are pushed in the order that readers announce, within
a budget of memory, and dropped behind them; and that random misses never thrash. Read first
`planner.py`, which decides what to push and drop next, with `decisions.py` (its decisions as
values). It is made of `stream_tracker.py` (where a reader is in its order), `units.py` (how an
order is cut into pushes), `resident_set.py` (what is resident and may go) and `miss_fill.py` (what
to push without an order). These are pure. `page_cache.py`, `content_page_cache.py` (for a native
mount) and `advice_process.py` make the system calls; `link.py` connects the worker with the mount's
server.
"""
