"""Metadata stores: which files a dataset has now, and in which chunks their bytes are.

A metadata store can be rebuilt from the chunks. There are two kinds: a SQLite file for a repository
in a folder (`sqlite/`), and a Redis that many hosts share (`redis/`).

Start with `store.py` and FORMAT.md, section 5 (the fold). Then read `sqlite/`, the simpler one, and
`rebuild.py`.
"""
