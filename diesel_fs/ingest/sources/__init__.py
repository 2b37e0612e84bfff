"""The sources of files (`Source` in `ingest/put.py`): `folder.py` (with `walk.py`), `tar.py` (with
`tar_headers.py`), `archives.py`, `bucket.py` and `file.py`. `manifest_file.py` fetches the manifest
of a put. The other modules read archives."""
