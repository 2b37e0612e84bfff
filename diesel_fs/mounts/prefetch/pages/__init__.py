"""The system calls by which the prefetch worker changes the kernel's page cache.

Start with `page_cache.py`: the interface, and its implementation for FUSE trees. The one for native
mounts is in `content_page_cache.py`; `staging_area.py` keeps account of its pages (pure).
`mount_files.py` opens files and measures how much of them is resident, `open_events.py` reports
opens of watched files, and `advice_process.py` drops pages in a process of its own.

Any of these calls may wait: for the mount's server, or for the lock on a page that a READ in
progress holds. So one thread of the worker makes them, and never the server.
"""
