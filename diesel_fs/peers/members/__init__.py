"""Who is in a task: its nodes, the registry where they find each other, and who owns each chunk.

`membership.py` has the values and their messages, `registry.py` and `redis_registry.py` keep them
up to date, `ownership.py` computes the owner of each chunk, and `owner_table.py` shares the result
with the readers of a node. `options.py` and `addresses.py` have what a task is asked for and where
a master listens. Nothing here holds a connection to another node.
"""
