"""The metadata store in one SQLite file beside the chunks of a repository in a folder.

Read `schema.py` (the tables), `store.py`, `fold.py` (a commit's changes), `runs.py` (why most files
have no row of their own), `rows.py` (reading) and `datasets.py`. `database_file.py` (connections,
forks, journals) and `host_lease.py` (network file systems) know nothing of datasets.
`shadow_state.py` builds a state that readers do not see yet.
"""
