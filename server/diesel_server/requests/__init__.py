"""The requests about datasets.

Start at `table.py`, which lists all requests with their roles; `dispatcher.py` runs handlers.
`queries.py` reads, `updates.py` writes, `jobs.py` runs long work with progress, `tasks.py` joins
nodes to tasks. `directory.py` finds a dataset, `head_cache.py` its current version.
"""
