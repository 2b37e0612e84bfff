"""The chunks that a node keeps, in memory and on its disk.

Start in `node_cache.py`. `sealed_memory.py` has memory that other processes may map,
`chunk_table.py` is what the data plane reads from without asking, and `chunk_future.py` has what
readers will read of each chunk.
"""
