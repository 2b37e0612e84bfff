"""The metadata store in Redis, for many hosts: one server, one under sentinels, or a cluster.

If Redis has lost data, reads raise an error instead of missing files.

Read `keys.py` (keys, values, terms), `transactions.py` (how a commit over many keys is atomic),
`store.py` (how a read gets one state), then the Lua scripts in `head_scripts.py` and
`bucket_scripts.py`.
"""
