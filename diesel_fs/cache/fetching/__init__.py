"""From ranges of chunks to requests: which ranges are read together, and how any store is asked for
them. The readers (`cache/readers/`) stand on this; `coalesce.py` is the place to start.
"""
