"""Order logs: the content of a mount on a local disk, in the order in which it will be read next
(LCache, sections III and V).

`../ORDER_LOG.md` defines an order log, its bytes, and its state after a crash. Every entry is
checked when it is read, so a log can be wrong or lost at any time: entries that it lacks are read
from the store. A failure of the disk is logged once, and the logs pause.

Start in `logs.py`, whose classes a mount's prefetch worker calls (`LoggedReader` there puts the
logs in front of another reader). `streams.py` decides which log each stream (a reader with an order
of its own) reads and writes, and `layout.py` the place of each entry; both are pure. `log_set.py`
has the logs that exist. `segments.py` reads ahead, `writer.py` is the thread that writes, rewrites
and removes logs, and `maker.py` makes them there. `addresses.py` passes the places of entries to
the mount's server.
"""
