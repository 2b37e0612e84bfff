"""One transport for all programs of DIESEL-FS: messages, frames, channels, connections.

Read `WIRE.md` first, then `messages.py` and `frames.py`, `client_connection.py` and `client.py`,
`channel.py` and `tls.py` (between the masters of a task, see `peers/PEERS.md`). Bytes from the
network are not trusted: they decode to a value or raise one error, and no memory is allocated for a
length before it is checked.

`messages`, `frames` and `breaker` are pure. The package imports nothing of storage or repositories.
"""
