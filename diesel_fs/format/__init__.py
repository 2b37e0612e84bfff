"""Every byte that DIESEL-FS keeps: chunks, snapshots, images, and the names of objects.

`FORMAT.md` beside this file is the authority; read it first. All modules are pure: bytes in, values
out. Bytes are untrusted: a reader raises a leaf of `FormatError`, and takes no more memory than the
format allows for the length of its input.

Then read `entries` (files, links and folders of a dataset), `chunk_id` (IDs and stamps), `chunk`
and `chunk_builder` (many entries packed into one object), `object_names`, `snapshot/` (all metadata
of a dataset at one version), `image/` (the tree of a snapshot as a file system that the kernel
mounts), and `manifest` (which file is which sample).
"""
