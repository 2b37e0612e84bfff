"""The chunks that a node keeps, in memory and on its disk.

Start in `node_cache.py`: the master calls only its `NodeCache`. `ledger.py` records where each
chunk is, `replacement.py` decides which chunk makes room for which, `lookahead.py` chooses the
chunks that are fetched ahead; these three do no I/O and never wait. Only `fetches.py` and `disk.py`
wait. `sealed_memory.py` has memory that other processes can map, `chunk_table.py` gives the
master's data plane (the thread that answers requests from memory) its view of the chunks, and
`chunk_future.py` has the reads of each chunk that are still to come.
"""
