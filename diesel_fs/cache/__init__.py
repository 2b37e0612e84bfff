"""Keeps chunks near the reader: in a process's memory, in a server's memory, on a local disk.

The package promises that every byte a reader gets has been checked against its checksum, and that a
cache which fails or is full costs time and never an error.

Three classes read, each for one kind of caller. `reader.py` has files for the Python API and the
server of a mount, out of chunks in memory (`chunk_cache.py`). `coalescing_reader.py` has many files
at once for the prefetch worker of a mount, by a `read_plan.py` and a `span_fetcher.py`;
`order_logs/` may stand in front of it. `range_reader.py` has parts of chunks for the clients of a
server. All stand on `coalesce.py` (reads that are merged, damage that is repaired),
`stored_parts.py` (one way to ask any store for parts) and `costs.py` (the costs of reads).

Three places keep whole chunks near a server or a node: `tiers.py` (memory), `disk/`, and
`read_through.py`, which fills one of them. `policy.py`, `lrfu.py`, `admission.py` and
`replacement.py` decide what a full cache takes in and what leaves it. These four,
`costs.py` and `read_plan.py` are pure: they do no I/O and know no clock.

Start with `reader.py`.
"""
