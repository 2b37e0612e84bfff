"""The verb `dashboard`: a page in the browser that shows mounts, tasks, servers and datasets live.

`watcher.py` refreshes a mount (`mounts.py`), a server (`servers.py`) or the repository
(`datasets.py`) in a thread for each, so one that hangs delays no other, and makes one JSON state
for the page. `web.py` speaks HTTP, and `site.py` answers each path. The page lies in `page/`: it
has no build step and names no other host. Everything here only reads.
"""
