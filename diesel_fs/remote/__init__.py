"""The repository behind a server: it has the interface of `repository`, and sends a request for
each operation.

`open.open_repository` chooses between this repository and the local one. The server checks the
user's permissions, and the client checks every answer.

Read `open.py` first, then `repository.py` (operations as requests) and `objects.py` (chunks). Both
ends use `values.py` (encodings) and `snapshot_transfer.py` (snapshots in compressed pieces).
"""
