"""Orders: in which sequence the files of a dataset are read, and how that is announced.

`shuffle.py` draws orders from a seed, the same in every process and on every machine; read it
first. `path_lists.py` writes an order as a list of paths. `plan.py` has the values by which readers
announce their orders, and the rules and limits for them. All of it is pure: no I/O and no clock.
Reading in an order is the business of `cache/` and `mounts/prefetch/`.
"""
