"""Decisions about a full cache, and the costs that they are made by. Nothing here does I/O or reads
a clock; `eviction.py` is the place to start.
"""
