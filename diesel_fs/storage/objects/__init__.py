"""Object stores: where chunks, snapshots and leases lie as named, immutable byte strings.

Every store promises the same (`ObjectStore` in `store.py`): an object is absent or whole, is never
overwritten, is durable when `put` returns, and a listing is complete and in byte order. Names come
from `format/object_names.py`; a store does not interpret contents.

Read `store` (the interface, and the wrappers), `folder` (objects as files; with `direct_writes` and
`nowait_reads`), `retry` (repeats failed calls of another store), then `cloud/` (buckets). Nothing
here imports the metadata stores.
"""
