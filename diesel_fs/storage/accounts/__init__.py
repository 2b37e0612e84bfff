"""Accounts of a repository: which users may read, write or administer which datasets.

A server reads them; `dlcmd user` and `dlcmd grant` change them. They cannot be rebuilt, so users
should export them as a backup. Read `account.py` (pure), then `store.py` (the interface, and the
table in a file), then `redis.py`.
"""
