"""The three processes of a mount. `launcher.py` beside this folder starts and ends them.

- `supervisor.py` starts the other two, and ends the mount when one of them dies. Start here.
- `server.py` mounts the dataset and answers the kernel.
- `prefetch_worker.py` puts contents into the kernel's page cache before they are read.

One rule: the supervisor and the server never read the mount or wait for its pages. Only the worker
may wait for a page lock, and the supervisor can free it by aborting the connection.
"""
