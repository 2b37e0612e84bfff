"""Every byte that DIESEL-FS keeps: chunks, snapshots, images, and the names of objects.

`FORMAT.md` beside this file is the authority; read it first. All modules are pure: bytes in, values
out. Bytes are untrusted: a reader raises a leaf of `FormatError`, and the length of its input
limits the memory that it takes.

Then read `entries` (files, links and folders), `chunk_id` (IDs and stamps), `chunk` and
`chunk_builder` (many entries in one object), `object_names`, `snapshot/` (all metadata of a dataset
at one version), `image/` (a snapshot's tree as a file system that the kernel mounts), and
`manifest` (which file is which sample)."""
