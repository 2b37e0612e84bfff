"""The sources of files: each module here is one `Source` of `ingest/put.py`.

`folder.py` (with `walk.py`), `tar.py` (with `tar_headers.py`), `archives.py`, `bucket.py` and
`file.py`. `manifest_file.py` fetches the manifest of a put.
"""
