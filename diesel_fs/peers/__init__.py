"""The cache that the nodes of a training task share (DIESEL, section 4.2).

A task is a set of nodes that train on one dataset. Each node runs one master, a process that keeps
the node's share of the dataset's chunks in memory and on disk, and gives them to readers on its own
node and to other masters. Readers never depend on it: what a master does not give, they read from
the object store, and every byte is checked against the reader's own snapshot.

Read `PEERS.md` first: it defines the protocols. Then `options.py` and `client.py` (what a reader
uses: an object store that asks the master first), `launch.py` and `daemon.py` (how a master starts
and ends), `master.py` (one node of a task), `node_cache.py` with `node_memory.py` and
`write_back.py` (what the node keeps), `ownership.py` (which node keeps which chunk), `peer.py` and
`acceptor.py` (the two ends of a connection between masters), `membership.py` and `registry.py` (who
is in a task).
"""
