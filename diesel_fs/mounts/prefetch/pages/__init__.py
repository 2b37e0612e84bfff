"""The page cache of the kernel, as the prefetch worker changes it: the system calls of a mount.

Start with `page_cache.py`: the interface, and its implementation for FUSE trees. The one for native
mounts is in `content_page_cache.py`; `staging_area.py` keeps account of its pages (pure).
`mount_files.py` opens files and measures how much of them is resident, `open_events.py` reports
opens of watched files, and `advice_process.py` drops pages in a process of its own.

One rule: any of these system calls may wait for the mount's server, so the server never makes them.
"""
