"""The metadata store in Redis, for many hosts: one server, one under sentinels, or a cluster.

Reads and commits are correct whatever other clients do, even while Redis restarts or slots are
moved. If Redis has lost data, reads raise an error instead of missing files.

Read `keys.py` (keys, values, terms), `transactions.py` (how a commit over many keys is atomic),
`store.py` (how a read gets one state), then the Lua scripts in `head_scripts.py` and
`bucket_scripts.py`. `pieces.py` packs the scripts' input, `rows.py` reads entries,
`shadow_state.py` rebuilds, and `pipelined_head.py` is a shortcut for the server.
"""
