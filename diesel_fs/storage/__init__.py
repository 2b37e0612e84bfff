"""Stores of a repository: objects, metadata and accounts.

- `objects/`: the chunks, in a folder or a bucket. Nothing else has the data.
- `metadata/`: which files a dataset has, in SQLite or Redis. It can be rebuilt from the chunks.
- `accounts/`: which users may do what, kept beside the metadata. They cannot be rebuilt.

Each has one interface (`store.py`) and several implementations, which one suite of tests checks.
Callers open stores through `open_stores.py`. `repository/` decides what an operation means.
"""
