"""One transport for all programs of DIESEL-FS: messages, frames, channels, connections.

Clients and servers talk as `WIRE.md` says; the masters of a training task use the same messages,
channels and breakers (`peers/PEERS.md`). What comes from the network is not trusted: any bytes
decode to a value or raise one error, and no memory is taken for a length before it is checked.

Read first `WIRE.md`, then `messages.py` (maps with typed fields), `frames.py` (greeting, login,
frames, limits), `client_connection.py` and `client.py` (a client's connections), `channel.py` and
`tls.py` (between masters). `breaker.py`, `singleflight.py`, `budget.py` and `keys.py` stand alone.

`messages`, `frames` and `breaker` are pure: no sockets, no clock. The package imports nothing of
storage or repositories, which are built on it.
"""
