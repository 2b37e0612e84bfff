"""The Python API: datasets are read and written without a mount.

Users import it as `diesel_fs`; README.md beside this file describes each call. A dataset shows one
version until it is told to move on, may be read by several threads and forked children, and never
puts a secret into a pickle.

Read in this order: `dataset.py` (`connect` and the class `Dataset`), `pending_puts.py` (its
writes), `addressing.py` (paths and indices), `reopening.py` (the content of a pickle). `extract.py`
writes entries back to files and `differences.py` compares versions; `dlcmd get` and `dlcmd diff`
call them. The package stands above `repository`, `ingest` and `peers`, and does not import
`mounts`.
"""
