"""The task-grained cache: the nodes of a training task hold its dataset together (DIESEL, 4.2).

`PEERS.md` says how nodes talk; `client.py` is what readers see: an object store.
"""
