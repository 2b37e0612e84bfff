"""A purge in a process of its own, to be killed: `purge_driver.py URL`; nothing waits for grace.

Prints "acknowledged" only when `purge` has returned.
"""

import sys

from diesel_fs.repository.local import LocalRepository
from diesel_fs.repository.purge import PurgeOptions, purge

if __name__ == "__main__":
    with LocalRepository.open(sys.argv[1]) as repository:
        purge(repository, "ds", PurgeOptions(0, 0, 0))
    print("acknowledged", flush=True)
