"""A snapshot: all metadata of one dataset at one version, in one file that is used as it lies.

A mount or a client maps the file into memory and looks paths up in it without unpacking anything;
the layout is FORMAT.md, section 7. A snapshot is never changed: the next version is a new file.

Read in this order: `layout` (the bytes, and their checks), `reader` (`Snapshot`: lookup, listing,
stat), `build` (the next snapshot from the previous one and changed rows), `diff` (the entries that
two versions have in common), `entry_digest` (a check of a new snapshot against the headers of its
chunks).
"""
