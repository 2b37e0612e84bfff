"""Decides which chunks a full cache takes in and gives up, and models the costs of reads. Nothing
here does I/O or reads a clock. Start with `eviction.py`.
"""
