"""The streams of the prefetch planner: readers whose orders of files are known. Pure.

Start with `stream_tracker.py`, which explains the positions of one stream and names the modules of
its parts.

`changes.py` alone adds and removes streams. `units.py` cuts an order into units, the files of one
push each.
"""
