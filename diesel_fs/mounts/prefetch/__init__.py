"""Makes the contents of files resident in the kernel's page cache before a reader asks for them.

The package serves the *prefetch worker* (`daemon/prefetch_worker.py`), a process that each mount
starts beside its server. It promises that contents are pushed in the order that readers announce,
within a budget of memory, and dropped behind them; and that random misses never thrash.

Start with `planner.py`, which makes one decision at a time, and `decisions.py`. Its parts:

- `streams/`: the readers whose orders are known, and the units to push for them;
- policies: `turns.py` (the next stream), `balance.py` (Lobster), `room.py` and `eviction.py`
  (drops), `memory_split.py` (iCache), `freed_pages.py` and `miss_fill.py` (other pushes);
- memory: `memory.py` (budget and shares), `resident_set.py` (the resident and the claimed files);
- `pages/`: the system calls that carry decisions out; `link.py`: the worker's connection with the
  mount's server.

One rule: all but `pages/` and `link.py` is pure. It does no I/O, gets the time as an argument, and
is used by one thread.
"""
