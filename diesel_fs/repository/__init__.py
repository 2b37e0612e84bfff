"""The operations on datasets: finding, reading, writing, recovering, purging.

A repository is an object store, whose chunks are the truth, and a metadata store, which can be made
from them again. If an operation ends at any step, for any reason, nothing that was acknowledged is
lost, and the same operation can be run again.

Start with `interface.py` (what every repository can do), then `writing.py` and `stored.py` (how a
chunk is committed, which snapshot a reader gets). `versions.py`, `leases.py` and `retention.py`
decide which versions and chunks stay; `expected_chunks.py` which chunks there must be, for
`recover.py` and `verify.py`; `purge.py` frees space; `admin.py` changes accounts. The same
interface over a server is in `remote/`, which stands above this package.
"""
