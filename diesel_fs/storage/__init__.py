"""Where a repository's bytes and rows are stored: objects, metadata and accounts.

- `objects/`: the chunks, as objects in a folder or a bucket. Nothing else has the data.
- `metadata/`: which files a dataset has, in SQLite or Redis. It can be rebuilt from the chunks.
- `accounts/`: which users may do what. It is kept beside the metadata, and cannot be rebuilt.

Each has one interface (`store.py`) and several implementations, which one suite of tests checks.
Start with these interfaces. `open_stores.py` chooses the implementation for a URL; code above this
package opens stores through it alone. `repository/` decides what an operation on a dataset means,
not this package.
"""
