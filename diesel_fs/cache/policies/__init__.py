"""Decides what a full cache takes in and what leaves it, and models the costs of reads. Nothing
here does I/O or reads a clock; `eviction.py` is the place to start.
"""
