"""Keeps chunks near the reader: in a process's memory, in a server's memory, on a local disk.

The package promises that every byte a reader gets has been checked against its checksum, and that a
cache which fails or is full costs time and never an error.

`readers/` has one reader for each kind of caller: the Python API and a mount's server, a mount's
prefetch worker (with `order_logs/` in front of it, if order logs are used), and the clients of a
server. They share `fetching/`, which merges requests and repairs damage.

Whole chunks are kept by `tiers.py` (in memory) and `disk/`; `read_through.py` fills a server's
tier. `policies/` decides which chunks a full cache takes in and gives up. `waiting.py` records the
causes for which a read waits.

Start with `readers/entry_reader.py`.
"""
