"""The requests about datasets.

`dispatcher.py` defines requests and replies, and runs handlers. `table.py` lists all requests with
the role that each needs; start there. The handlers: `queries.py` reads, `updates.py` writes,
`jobs.py` runs long work with progress, `tasks.py` joins nodes to tasks. `directory.py` finds a
dataset by its name or identity; `head_cache.py` answers which version is current.
"""
