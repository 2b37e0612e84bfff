"""The words of a command line: options, their types, addresses, and the sources of a put.

Start at `options.py`: the global options, and the types that all verbs share. `fields.py` makes
options of the fields of a request. `addresses.py` reads `DATASET@VERSION/path` and opens the
repository; `accounts.py` opens the accounts of a server. `put_sources.py` and `buckets.py` open the
sources of `put`. `completing.py` answers a shell when the user presses TAB. `options.py` imports
little, since every start of `dlcmd` pays for it.
"""
