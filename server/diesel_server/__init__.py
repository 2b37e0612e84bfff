"""`diesel-server`: one port in front of an object store and a metadata store.

It keeps no state of its own: any number of servers may serve one store. `README.md` is the
operator's page, `diesel_fs/net/WIRE.md` the protocol. Start at `connections/connection.py`, the
life of a connection, which calls everything else.

| package | its knowledge |
| --- | --- |
| `process` | a server is several processes: a supervisor, and workers that it restarts |
| `connections` | how bytes become requests, and when a client is refused |
| `accounts` | how a login is checked, and the requests that change accounts |
| `requests` | what each request about datasets does, and which role it needs |

`limits.py` has every limit with its reason. Imports go one way: `process` wires all, `connections`
knows a dispatcher but no request, `requests` and `accounts` know no connection.
"""
