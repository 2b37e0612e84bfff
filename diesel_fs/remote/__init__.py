"""The repository behind a server: the interface of `repository` by requests.

`open.open_repository` chooses between it and the local repository. The server checks the user's
permissions, and the client checks every answer.

Read `open.py` first, then `repository.py` (operations as requests) and `objects.py` (chunks). Both
ends use `values.py` (encodings) and `snapshot_transfer.py` (snapshots in compressed pieces).
"""
