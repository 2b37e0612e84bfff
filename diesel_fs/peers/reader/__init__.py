"""How a training process reads through the task's cache. If the cache fails, reads go to the store,
so no read fails because of it.

`store.py` is the object store that callers see. `task_chunks.py` decides which master to ask.
`mapped_chunks.py` has the chunks that this process maps from its node's master, `owner_link.py`
reads parts of chunks from masters, and `master_link.py` has the control connections.
"""
