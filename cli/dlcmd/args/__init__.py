"""The words of a command line: options, their types, addresses, and the sources of a put.

Start at `options.py`: the global options, and the types that all verbs share. `fields.py` makes
options from the fields of a dataclass. `addresses.py` reads `DATASET@VERSION/path` and opens the
repository, `accounts.py` the accounts of a server. `put_sources.py` and `buckets.py` open the
sources of `put`. `completing.py` answers a shell when the user presses TAB.
"""
