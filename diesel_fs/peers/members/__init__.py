"""The members of a task: its nodes, the registry by which they find each other, and chunk owners.

`membership.py` has the values and their messages, `registry.py` and `redis_registry.py` keep them
up to date, `ownership.py` computes the owner of each chunk, and `owner_table.py` shares the result
with the readers of a node. `options.py` and `addresses.py` have the options of a task and the
address at which a master listens. Nothing here holds a connection to another node.
"""
