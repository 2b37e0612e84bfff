"""Makes the contents of files resident in the kernel's page cache before a reader asks for them.

The package serves the *prefetch worker* (`daemon/prefetch_worker.py`), a process that each mount
starts beside its server. It promises that contents are pushed in the order that readers announce,
within a budget of memory, and dropped behind them; and that random misses never thrash.

Start with `planner.py`, which makes one decision at a time, and `decisions.py`. Its parts:

- streams: `streams.py` (changes of the plan), `stream_tracker.py` (one stream, in parts),
  `stream_views.py` (questions), `signs.py` (which reader made a READ), `watches.py` (inotify),
  `units.py` (how an order is cut into pushes);
- policies: `turns.py` (the next stream), `balance.py` (Lobster), `room.py` and `eviction.py`
  (drops), `memory_split.py` (iCache), `freed_pages.py` and `miss_fill.py` (other pushes);
- memory: `memory.py` (budget and shares), `resident_set.py` (the resident and the claimed files).

One rule: these parts are pure. They do no I/O, get the time as an argument, and are used by one
thread. So is `staging_area.py`, the account of a native mount's page cache. The system calls are in
`page_cache.py` and `content_page_cache.py`. `link.py` connects the worker with the mount's server.
"""
