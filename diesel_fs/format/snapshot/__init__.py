"""A snapshot: all metadata of one dataset at one version, in one file that is mapped and used as it
lies.

A snapshot never changes: the next version is a new file (FORMAT.md, section 7), or a delta on an
earlier one (section 8). Read `layout` (the bytes, and their checks), `reader` (`Snapshot`: lookup,
listing, stat), `build` (the next snapshot from the previous one and changed rows), `delta` (what
changed between two versions), `layered` (lookups in a snapshot and deltas above it, not merged),
`diff` (the entries that two versions have in common). Two digests find errors: `rows_digest` (of
all rows, which follows changes) and `entry_digest` (against the headers of chunks).
"""
