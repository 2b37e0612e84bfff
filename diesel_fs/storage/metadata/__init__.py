"""Metadata stores: which files a dataset has now, and in which chunks their bytes are.

A metadata store is derived from the chunks and can be rebuilt from them. There are two kinds: a
SQLite file for a repository in a folder (`sqlite/`), and a Redis that many hosts share (`redis/`).
`tests/storage/metadata/test_metadata_contract.py` checks both.

Start with `store.py` and FORMAT.md, section 5 (the fold). Then read `sqlite/`, the simpler one, and
`rebuild.py`.
"""
