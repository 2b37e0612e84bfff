"""The program of a mount on a machine that frees no pages by itself: pushed pages stay in the page
cache until the mount drops them.

A real machine may free pages that nobody has read for some seconds (DAMON does). The mount
notices this by samples and READs, and then assumes that the pages beside them are gone, too.
Here residency follows from the mount's decisions alone.
"""

import logging
import os
import sys

from diesel_fs.mounts.daemon.supervisor import main
from diesel_fs.mounts.prefetch.pages.content_page_cache import ContentPageCache
from diesel_fs.mounts.prefetch.pages.page_cache import FusePageCache, PageCache

PROGRAM = (sys.executable, "-m", "tests.mounts.keeping_daemon")


def whole_bytes(cache: PageCache, entry: int) -> int:
    return cache._snapshot.stat(entry).size


if __name__ == "__main__":
    for each in (FusePageCache, ContentPageCache):
        setattr(each, "resident_bytes", whole_bytes)  # noqa: B010  # mypy forbids =
        setattr(each, "is_lost", lambda *_: False)  # noqa: B010
    code = main(sys.argv[1:])
    logging.shutdown()
    os._exit(code)
