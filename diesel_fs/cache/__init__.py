"""Keeps chunks near the reader: in a process's memory, in a server's memory, on a local disk.

The package promises that every byte a reader gets has been checked against its checksum, and that a
cache which fails or is full costs time and never an error.

`readers/` has one reader for each kind of caller: the Python API and a mount's server, a mount's
prefetch worker (in front of it may stand `order_logs/`), and the clients of a server. The readers
use `fetching/` to merge requests, to share those that are under way, and to repair damage.

Three places keep whole chunks near a server or a node: `tiers.py` (memory), `disk/`, and
`read_through.py`, which fills one of them. `policies/` decides which chunks a full cache takes in
and gives up. `waiting.py` records the causes for which a read waits.

Start with `readers/entry_reader.py`.
"""
