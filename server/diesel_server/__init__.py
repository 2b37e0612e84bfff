"""`diesel-server`: one port in front of an object store and a metadata store.

It keeps no state of its own: any number of servers may serve one store. `README.md` is the
operator's page, `diesel_fs/net/WIRE.md` the protocol.

Start reading at `connections/connection.py`: it has the life of a connection, from which everything
else is called.

| package | its secret |
| --- | --- |
| `process` | a server is several processes: a supervisor, and workers that it restarts |
| `connections` | how bytes become requests, and when a client is refused |
| `accounts` | how a login is checked, and the requests that change accounts |
| `requests` | what each request about datasets does, and which role it needs |

`main.py` and `options.py` are the command; `limits.py` has every limit with its reason. Imports go
one way: `process` wires all, `connections` knows a dispatcher of requests but no request, and
`requests` and `accounts` know no connection.
"""
