"""Reads chunks, with one module for each kind of caller: `entry_reader.py` for the Python API and a
mount's server, `coalescing_reader.py` for a mount's prefetch worker, `range_reader.py` for a
server, which answers its clients.
"""
