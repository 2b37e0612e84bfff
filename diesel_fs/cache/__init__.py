"""Keeps chunks near the reader: in a process's memory, in a server's memory, on a local disk.

The package promises that every byte a reader gets has been checked against its checksum, and that a
cache which fails or is full costs time and never an error. Read first `reader.py` (files out of
chunks in memory, for the Python API), with `chunk_cache.py` and `order_prefetch.py` (which chunks
stay there). `coalescing_reader.py` reads for the prefetch worker of a mount, `range_reader.py` for
the clients of a server; `coalesce.py` has what the three readers share. `tiers.py`, `disk/` and
`read_through.py` keep whole chunks near a server or a node. `policy.py`, `lrfu.py` and
`admission.py` decide what a full cache evicts and takes in; they are pure.
"""
