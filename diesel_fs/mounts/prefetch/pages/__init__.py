"""The page cache of the kernel, as the prefetch worker changes it: the system calls of a mount.

Start with `page_cache.py`, the interface and its form for FUSE trees; `content_page_cache.py` is
the one for native mounts, with `staging_area.py` as its account (pure). `mount_files.py` opens
files and measures their residency, `open_events.py` reports opens of watched files, and
`advice_process.py` drops pages in a process of its own.

One rule: any of these calls may wait for the mount's server, so the server never makes them.
"""
