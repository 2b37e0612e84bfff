"""What a user types: options, their types, addresses, and the sources of a put.

Start at `options.py`: the global options, and the types that all verbs share. `addresses.py` reads
`DATASET@VERSION/path` and opens the repository. `put_sources.py` and `buckets.py` open what `put`
packs. `completing.py` answers a shell when the user presses TAB. `options.py` imports little, since
every start of `dlcmd` pays for it.
"""
