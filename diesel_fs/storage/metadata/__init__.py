"""Metadata stores: which files a dataset has now, and in which chunks their bytes are.

A metadata store is derived from the chunks and can be rebuilt from them; it makes lookups fast and
commits atomic. There are two kinds: a SQLite file for a repository in a folder (`sqlite/`), and a
Redis that many hosts share (`redis/`). One suite of tests checks both
(`tests/storage/metadata/test_metadata_contract.py`).

Start with `store.py`; FORMAT.md, section 5, has the rules of the fold. Then read `sqlite/`, the
simpler one, and `rebuild.py`.
"""
