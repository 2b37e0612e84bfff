"""The three processes of a mount. `launcher.py` beside this folder starts and ends them.

- `supervisor.py` starts the other two, and ends the mount when one of them dies. Start here.
- `server.py` mounts the dataset by the best session that works (`session_choice.py`), and answers
  the kernel until a signal or a failure (`ending.py`).
- `prefetch_worker.py` puts contents into the kernel's page cache before they are read.

One rule: supervisor and server never wait for a page of the mount. Only the worker may, and the
supervisor frees it by aborting the connection.
"""
