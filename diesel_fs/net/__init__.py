"""One transport for all programs of DIESEL-FS: messages, frames, channels, connections.

Read `WIRE.md` first, then `messages.py` and `frames.py`, `client_connection.py` and `client.py`,
`channel.py` and `tls.py` (between the masters of a task, see `peers/PEERS.md`). Bytes from the
network are not trusted: a parser returns a value or raises one error, and allocates no memory for a
length that it has not checked.

`messages`, `frames` and `breaker` do no I/O.
"""
