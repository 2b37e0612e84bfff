"""The operations on datasets: finding, reading, writing, recovering, purging.

A repository is an object store, whose chunks are the truth, and a metadata store, which can be made
from them again. An operation may end at any step: nothing that was acknowledged is lost, and the
operation can be repeated.

Start with `interface.py` (the operations of every repository), then `writing.py` and `stored.py`
(how a chunk is committed, which snapshot a reader gets). `versions.py` publishes versions and reads
them, as snapshots and deltas (`chains.py` decides which); `leases.py` and `retention.py` decide
which versions and chunks stay, `expected_chunks.py` which chunks must exist, for `recover.py` and
`verify.py`. `remote/` has the same interface over a server.
"""
