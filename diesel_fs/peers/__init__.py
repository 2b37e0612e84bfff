"""The cache that the nodes of a training task share (DIESEL, section 4.2).

Each node runs one master, a process that keeps the node's share of the dataset's chunks in memory
and on disk, for the readers on its node and for other masters. Readers never depend on a master:
what it does not give, they read from the object store, and they check every byte.

`PEERS.md` defines the protocols. Read on in `client.py` (a reader's object store), `launch.py` and
`daemon.py` (how a master starts and ends), `master.py` (one node of a task), `node_cache.py` (the
chunks that it keeps), `ownership.py` (which node keeps which chunk), `peer.py` and `acceptor.py`
(connections between masters), and `registry.py` (the members of a task).
"""
