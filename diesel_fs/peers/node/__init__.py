"""The chunks that a node keeps, in memory and on its disk.

Start in `node_cache.py`: the master calls only its `NodeCache`. `ledger.py` records where each
chunk is, `replacement.py` decides which chunk makes room for which, `lookahead.py` chooses the
chunks to fetch ahead; these three never wait. Only `fetches.py` and `disk.py` wait.
`sealed_memory.py` has memory that other processes can map, `chunk_table.py` the chunks that the
data plane's thread sees, `chunk_future.py` the reads that are still to come.
"""
