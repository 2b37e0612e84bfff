"""Every byte that DIESEL-FS keeps: chunks, snapshots, and the names of objects.

`FORMAT.md` beside this file is the authority; read it first. All modules are pure: bytes in, values
out, no clock and no I/O. Bytes are untrusted: a reader raises a leaf of `FormatError`, and takes no
more memory than the format allows for the length of its input.

Then read `entries` (what a file, link or folder of a dataset is), `chunk_id` (IDs and stamps),
`chunk` and `chunk_builder` (many entries packed into one object), `object_names` (where objects
lie), `snapshot/` (all metadata of a dataset at one version, in one file), `image/` (the tree of a
snapshot as a file system that the kernel mounts), and `manifest` (which file is which sample).
"""
