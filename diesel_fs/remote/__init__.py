"""The repository behind a server: the interface of `repository`, carried out by requests.

`RemoteRepository` and the local repository are interchangeable; `open.open_repository` chooses one
by the address. The server checks what a user may do, and the client checks every answer.

Read first `open.py`, then `repository.py` (operations as requests), `objects.py` (chunks),
`values.py` (how values are encoded, for both ends) and `snapshot_transfer.py` (snapshots in
compressed pieces, for both ends). `net/client.py` is the connection below.
"""
