"""Makes the contents of files resident in the kernel's page cache before a reader asks for them.

The package serves the *prefetch worker* (`mounts/daemon/prefetch_worker.py`), a process that each
mount starts beside the kernel session. It promises that contents are pushed in the order that
readers announce, within a budget of memory, and dropped behind them; and that random misses never
thrash.

Start with `planner.py`, which makes one decision at a time, and `decisions.py`, its decisions as
values. The planner holds these parts together:

- streams: `streams.py` (changes of the plan), `stream_views.py` (questions about streams),
  `stream_tracker.py` (where one reader is, and what it claims), `signs.py` (which reader a READ
  belongs to), `watches.py` (inotify), `units.py` (how an order is cut into pushes);
- policies: `turns.py` (which stream is next), `balance.py` (Lobster), `room.py` (what is dropped),
  `memory_split.py` (iCache), `freed_pages.py` (what is pushed again), `miss_fill.py` (what to push
  without an order);
- memory: `memory.py` (budget and shares; `cli` and `warmup` take its constants for names),
  `resident_set.py` (what is resident and may go).

One rule: these parts are pure. They do no I/O, get the time as an argument, and are used by one
thread. The system calls are in `page_cache.py`, `content_page_cache.py` (for a native mount) and
`advice_process.py`; `link.py` connects the worker with the mount's server.
"""
