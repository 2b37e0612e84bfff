"""Reads chunks, with one module for each kind of caller: `entry_reader.py` for the Python API and
the server of a mount, `coalescing_reader.py` for the prefetch worker of a mount, `range_reader.py`
for a server, which answers its clients.
"""
