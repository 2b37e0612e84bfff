"""The sequences in which the files of a dataset are read, and their announcement.

Start with `shuffle.py`, which draws orders from a seed, the same on every machine. `path_lists.py`
writes an order as a list of paths; `plan.py` has the values by which readers announce orders. All
of it is pure: it does no I/O and reads no clock. `cache/` and `mounts/prefetch/` read the files.
"""
