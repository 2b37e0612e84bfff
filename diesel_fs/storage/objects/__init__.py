"""Object stores: where chunks, snapshots and leases lie as named, immutable byte strings.

Every store promises the same (`ObjectStore` in `store.py`): an object is absent or whole, is never
overwritten, is durable when `put` returns, and a listing is complete and in byte order. Names of
objects come from `format/object_names.py`; a store does not interpret the content of an object.

Read in this order: `store` (the interface, and the wrappers), `folder` (objects as files; with
`direct_writes` and `nowait_reads`), `retry` (repeats failed calls of another store), then `cloud/`
(buckets). Metadata is stored elsewhere, in `storage/metadata/`; nothing here imports it.
"""
