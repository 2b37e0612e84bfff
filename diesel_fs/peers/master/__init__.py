"""The master: the process that keeps one node's chunks and serves them.

`daemon.py` starts and ends it. `data_plane.py` answers reads of chunks in memory, in a thread of
its own; all the rest runs in one trio loop: `master.py` (the node's part in the task),
`acceptor.py` (connections from other nodes), `peer.py` (to them) and `local.py` (own readers).
"""
