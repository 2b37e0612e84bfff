"""Accounts of a repository: which users may read, write or administer which datasets.

A server reads them to decide what a user may do; `dlcmd user` and `dlcmd grant` change them. Unlike
metadata they cannot be rebuilt, so users should export them as a backup.

Read `account.py` (users, roles, changes, the text format; pure), then `store.py` (the interface of
a table, and the table in a file), then `redis.py` (the table in Redis).
"""
