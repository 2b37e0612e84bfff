"""Readers of chunks, one for each kind of caller: `entry_reader.py` for the Python API and the
server of a mount, `coalescing_reader.py` for the prefetch worker of a mount, `range_reader.py` for
the clients of a server.
"""
