"""Makes the contents of files resident in the kernel's page cache before a reader asks for them.

The package serves the *prefetch worker* (`daemon/prefetch_worker.py`), a process that each mount
starts beside its server. The package promises that contents are pushed in the order that readers
announce, within a budget of memory, and dropped once the readers have passed; and that random
misses never make it push and drop by turns.

Start with `planner.py`, which makes one decision at a time, and `decisions.py`. The other parts:

- `streams/`: the readers whose orders are known, and the units (files of one push) for them;
- policies: `turns.py` (the next stream), `balance.py` (costs of fetching, as in Lobster), `room.py`
  and `eviction.py` (drops), `memory_split.py` (memory for important files, as in iCache),
  `freed_pages.py` (files that the kernel has freed) and `miss_fill.py` (pushes without a plan);
- memory: `memory.py` (budget and shares), `resident_set.py` (which files are resident, and which
  are claimed, that is kept for a reader);
- `pages/`: the system calls that carry decisions out; `link.py`: the worker's connection with the
  mount's server.

One rule: all modules but `pages/` and `link.py` are pure. They do no I/O, get the time as an
argument, and are used by one thread.
"""
