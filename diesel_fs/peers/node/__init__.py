"""The chunks that a node keeps, in memory and on its disk.

Start in `node_cache.py`, the face for the master. `ledger.py` keeps the place of each chunk is and
how much room is left; `replacement.py` decides which chunk makes room for which, and `lookahead.py`
which chunks are fetched before anyone asks. These three are pure and never wait. `fetches.py` and
`disk.py` are the only parts that wait: for other nodes, the store, and the disk.

`sealed_memory.py` has memory that other processes may map, `chunk_table.py` has what the data plane
reads from without asking, and `chunk_future.py` has what readers will read of each chunk.
"""
