"""The words of a command line: options, their types, addresses, and the sources of a put.

Start at `options.py`, which has the types that all verbs share. `fields.py` makes options from the
fields of a dataclass. `addresses.py` reads `DATASET@VERSION/path` and opens the repository.
`completing.py` answers a shell when the user presses TAB.
"""
