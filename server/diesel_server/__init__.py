"""`diesel-server`: one port in front of an object store and a metadata store.

It keeps no state of its own: any number of servers may serve one store. `README.md` is the
operator's page, `diesel_fs/net/WIRE.md` the protocol.

A server is a parent process (`main.py`, `options.py`, `supervisor.py`) and workers (`worker.py`,
`wiring.py`). Read them in the order of a request: `listener.py` accepts a connection, `channel.py`
moves its bytes, `connection.py` logs the client in (`authentication.py`) and receives requests,
`requests.py` runs the handler that `request_table.py` names: `queries.py` (reading), `updates.py`
(writing), `jobs.py` (long work), `account_handlers.py`, `task_handlers.py`. `limits.py` has every
limit; `head_cache.py` answers "which version is current".
"""
