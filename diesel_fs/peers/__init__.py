"""The cache that the nodes of a training task share (DIESEL, section 4.2).

Each node runs one master, a process that keeps the node's share of the dataset's chunks in memory
and on disk, for the readers of all nodes and for other masters. Readers never depend on a master:
what it does not give, they read from the object store.

`PEERS.md` defines the protocols. Read on in `client.py` and `task_chunks.py` (a reader's object
store, and where it finds chunks), `owner_link.py` (its connections to the owners), `launch.py` and
`daemon.py` (how a master starts and ends), `data_plane.py` (a master answers what is in memory),
`master.py` (the rest of one node of a task), `node_cache.py` (the chunks that it keeps),
`ownership.py` (which node keeps which chunk), `peer.py` and `acceptor.py` (connections from and to
masters), and `registry.py` (the members of a task).
"""
