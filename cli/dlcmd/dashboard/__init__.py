"""The verb `dashboard`: a page in the browser that shows mounts, tasks, servers and datasets live.

`watcher.py` asks all sources at each tick, and makes of their answers one state, which the page
gets as JSON. A source is a mount (`mounts.py`), a server (`servers.py`) or the repository
(`datasets.py`); each has a thread of its own, so one that hangs delays no other. What `mounts.py`
makes of two samples are the figures of `dlcmd top` (`../show/mount_figures.py`). `history.py` keeps
the last hour of each source, in memory of a fixed size.

`web.py` speaks HTTP, as much as this page needs, `access.py` checks the token, and `site.py`
answers each path. The verb is `../verbs/dashboard.py`. The page itself lies in `page/`: it has no
build step and names no other host. Everything here only reads.
"""
