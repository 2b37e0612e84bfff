"""A purge, without a grace period, in a process of its own, which a test kills: `purge_driver.py
URL`.

Prints "acknowledged" only when `purge` has returned.
"""

import sys

from diesel_fs.repository.interface import PurgeOptions
from diesel_fs.repository.local import LocalRepository

if __name__ == "__main__":
    with LocalRepository.open(sys.argv[1]) as repository:
        repository.purge("ds", PurgeOptions(0, 0, 0))
    print("acknowledged", flush=True)
