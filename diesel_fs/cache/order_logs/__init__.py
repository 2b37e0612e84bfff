"""Order logs: files on a local disk, in the order in which they will be read next (LCache, sections
III and V). `../ORDER_LOG.md` defines them.

Every entry is checked when it is read, so a log may be wrong or lost at any time: files that it
lacks are read from the store. A failure of the disk is logged once, and the logs pause.

Start in `logs.py`, whose classes a mount's prefetch worker calls. `streams.py` decides which log
each stream (a reader with an order of its own) reads and writes, and `layout.py` the place of each
entry; both are pure. `log_set.py` has the logs that exist. `segments.py` reads ahead; `writer.py`
is the thread that writes, rewrites and removes logs, and `maker.py` makes them there.
`addresses.py` passes the places of entries to the mount's server.
"""
