"""From ranges of chunks to requests: which ranges are read together, and how they are requested
from any store. The readers (`cache/readers/`) stand on this; `coalesce.py` is the place to start.
"""
