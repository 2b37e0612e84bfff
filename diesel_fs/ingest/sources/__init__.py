"""The sources of files: each module here is one `Source` of `ingest/put.py`.

`folder.py` walks a directory tree (with `walk.py`), `tar.py` reads an archive (its headers are
parsed by `tar_headers.py`), `bucket.py` lists objects, and `file.py` takes a single file.
`manifest_file.py` is no source: it fetches the manifest of a put from the places of archives.
"""
