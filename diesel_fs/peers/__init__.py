"""The cache that the nodes of a training task share (DIESEL, section 4.2).

Each node runs one *master*, a process that keeps the node's share of the dataset's chunks in memory
and on disk. Readers (a mount, a DataLoader worker) ask the master that owns a chunk.

From the bottom up; a package imports only those before it, and a test checks that:

- `members/`: which nodes are in a task, which node owns which chunk, and what a task is asked for.
- `wire.py`, `local_wire.py`: all bytes that processes of a task exchange. `handshake.py`: how two
  of them prove that they belong to the task. `launch.py`: finding or starting a master.
- `reader/`: what a training process uses: an object store that asks masters first.
- `node/`: the chunks that a node keeps, and which chunk makes room for which.
- `plan/`: which files the readers of a task will read, and how masters learn it.
- `master/`: the process itself: a data plane that answers from memory, and a control plane.

One rule: a reader never depends on a master; what none gives in time, it reads from the store.
`PEERS.md` defines the protocols. To follow a read, start in `reader/store.py` and
`reader/owner_link.py`; on the other node in `master/data_plane.py` and `node/node_cache.py`.
"""
