"""The metadata store in Redis: one server, one under sentinels, or a cluster; for many hosts.

Reads and commits are correct whatever other clients do, even while Redis is restarted or slots are
moved. Clients notice if Redis has lost data: reads then raise an error instead of missing files.

Read `keys.py` (all keys and values, and the terms), `transactions.py` (how a commit over many keys
is atomic), `store.py` (how a read gets one state), then `head_scripts.py` and `bucket_scripts.py`
(the code that runs inside Redis). `pieces.py` packs the input of the scripts, `rows.py` reads
entries, `shadow_state.py` rebuilds. `link.py`, `address.py`, `errors.py` and `replies.py` know
nothing of datasets. `pipelined_head.py` is a shortcut for the server.
"""
