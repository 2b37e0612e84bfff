"""A snapshot: all metadata of one dataset at one version, in one file that is mapped and used as it
lies.

A snapshot never changes: the next version is a new file (FORMAT.md, section 7). Read `layout` (the
bytes, and their checks), `reader` (`Snapshot`: lookup, listing, stat), `build` (the next snapshot
from the previous one and changed rows), `diff` (the entries that two versions have in common),
`entry_digest` (a check against the headers of chunks).
"""
