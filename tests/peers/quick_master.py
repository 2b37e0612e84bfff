"""A master that tells others of its readers after hundredths of a second, so that tests in which
readers wait for that take less time. It fetches as far ahead of such readers as masters do of those
that take four times as long.
"""

import sys

from diesel_fs.peers import master, node_cache, task_plan
from diesel_fs.peers.daemon import main

setattr(master, "EXCHANGE_S", 0.03)  # noqa: B010  # mypy: it is imported there
task_plan.APPLY_S = 0.01
node_cache.PREFETCH_S, node_cache.RATE_PERIOD_S = 1.0, 0.5

if __name__ == "__main__":
    sys.exit(main())
