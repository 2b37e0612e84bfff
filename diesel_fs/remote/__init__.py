"""The repository behind a server: it has the interface of `repository`, and sends a request for
each operation. The server checks the user's permissions, and the client checks every answer.

Read `open.py` first, which chooses between this repository and the local one, then `repository.py`
(operations as requests) and `objects.py` (chunks). Both ends use `values.py` (encodings) and
`snapshot_transfer.py` (snapshots in compressed pieces).
"""
