"""The members of a task: its nodes, the registry by which they find each other, and chunk owners.

`membership.py` has the values and messages, `registry.py` and `redis_registry.py` keep them up to
date, `ownership.py` computes owners, `owner_table.py` shares them with the readers of a node.
"""
