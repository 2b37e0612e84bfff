"""The chunks that a node keeps, in memory and on its disk.

Start in `node_cache.py`, the face for the master. `ledger.py` knows where each chunk is,
`replacement.py` decides which chunk makes room for which, `lookahead.py` which chunks are fetched
ahead; these are pure. Only `fetches.py` and `disk.py` wait. `sealed_memory.py` has memory for other
processes to map, `chunk_table.py` serves the data plane, `chunk_future.py` has the reads of each
chunk that are to come.
"""
