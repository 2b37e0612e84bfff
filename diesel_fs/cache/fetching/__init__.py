"""Turns ranges of chunks into requests: decides which ranges are read together, and requests them
from any store. The readers (`cache/readers/`) use this package; start with `coalesce.py`.
"""
