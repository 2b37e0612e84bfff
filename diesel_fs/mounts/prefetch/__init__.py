"""Makes the contents of files resident in the kernel's page cache before a reader asks for them.

The *prefetch worker* (`daemon/prefetch_worker.py`), a process that each mount starts beside its
server, uses this package. Contents are pushed in the order that readers announce, within a budget
of memory, and dropped once the readers have passed.

Start with `planner.py`, which makes one decision at a time, and `decisions.py`. The other parts:

- `streams/`: the readers whose orders are known, and the units (files of one push) for them;
- policies: `turns.py` (the next stream), `balance.py` (costs of fetching, as in Lobster), `room.py`
  and `eviction.py` (drops), `memory_split.py` (memory for important files, as in iCache),
  `freed_pages.py` (files that the kernel has freed) and `miss_fill.py` (pushes without a plan);
- memory: `memory.py` (budget and shares), `resident_set.py` (resident and claimed files);
- `pages/`: the system calls that carry decisions out; `link.py`: the connection with the server.

All modules but `pages/` and `link.py` are pure: they do no I/O, get the time as an argument, and
are used by one thread.
"""
