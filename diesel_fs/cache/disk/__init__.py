"""Keeps whole chunks, or order logs, in a folder of a local disk that all processes of the machine
share.

    <folder>/.diesel-cache                          marks a cache; has the lock and the bytes used
    <folder>/.reading                               locked (shared) while a reader waits for a store
    <folder>/.disk-speed                            the disk's speed; locked while measured
    <folder>/<store UUID>/<identity>/<chunk ID>     a chunk; its mtime is its last use
    <folder>/<store UUID>/<identity>/.<chunk ID>    a chunk being written, locked by its writer
    <folder>/<store UUID>/<identity>/.used          its mtime is the dataset's last use; has the
                                                    dataset's references (starts of jobs); locked
                                                    (shared) by jobs
    <folder>/<store UUID>/<identity>/.logs          locked (shared) while order logs are in use
    <folder>/<store UUID>/<identity>/order-<name>   an order log, locked by the mount that uses it

`<identity>` is the dataset's UUID in hexadecimal. Start with `folder.py`: `CacheFolder` owns the
room in the folder, for all its stores, and evicts. `chunks.py` keeps chunks for a server or for the
nodes of a task. `logs.py` has the files of order logs (`order_logs/` reads and writes them): copies
of files in the order in which a mount will read them. While a dataset has order logs in use, none
of its chunks are written, and those that are here are evicted for the logs. `jobs.py` records the
uses of datasets, `speed.py` measures the disk, and `listing.py` serves programs that only look.

Eviction: a process that needs room looks at the chunks of all datasets. It spares two kinds. A job
that uses a dataset *pins* its chunks: they make no room for other datasets. A mount or a node of a
task holds a shared lock on `.used` as long as it lives, so a kill ends the pin, too. And a dataset
must *cool down*: nobody may have used it for some minutes (DLCache, section III-C.2), unless the
chunk has been unread for a day. If nothing may be evicted, a new chunk is not admitted; a process
with a lower limit than the jobs that filled the folder meets this at once. The folder keeps no
rule, so jobs need not agree: each process has its own (`rule.py`) for the length of the cool-down,
the order (the longest unread chunks first, or LRFU, `policies/lrfu.py`) and the weight of its job's
start.

Crashes: nothing is synced. A chunk is checked whole before it is written and when a process first
reads it, so a chunk that a crash has damaged is noticed and dropped. A process may die at any
point: the next process that needs room removes the dead one's unfinished files. After three
failures of the disk in a row, the cache serves nothing for `DISK_PAUSE_S`.

Concurrency: a process that makes or removes files holds an exclusive lock on `.diesel-cache`;
readers never wait for a lock. A process removes anything with a chunk's name that is not a regular
file, except a folder that is not empty. Safe from any thread and any process of the machine; not
usable in forked children.
"""
