"""The cache that the nodes of a training task share (DIESEL, section 4.2).

Each node runs a *master*, a process that keeps the node's share of the dataset's chunks in memory
and on disk. Readers (a mount, a DataLoader worker) ask the master that owns a chunk, or the store.
`PEERS.md` defines terms and protocols. A package imports only those before it:

- `members/`: a task's nodes and options, and which node owns which chunk.
- `wire.py`, `local_wire.py`, `handshake.py`: the bytes between processes of a task, and how these
  prove that they belong to it. `launch.py` finds or starts a master.
- `reader/`: an object store for training processes that asks masters first.
- `node/`: the chunks that a node keeps, and which chunk makes room for which.
- `plan/`: what the readers of a task will read, and how masters learn it.
- `master/`: the process itself.

To follow a read, start in `reader/owner_link.py`; on the other node in `master/data_plane.py`.
"""
