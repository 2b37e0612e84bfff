"""Object stores: where chunks, snapshots and leases lie as named, immutable byte strings.

`store` has the contract (`ObjectStore`) and the wrappers; a store does not interpret contents. Then
read `folder` (objects as files; with `direct_writes` and `nowait_reads`), `retry` (repeats failed
calls of another store) and `cloud/` (buckets). Nothing here imports the metadata stores.
"""
