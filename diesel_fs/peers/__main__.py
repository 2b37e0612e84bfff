"""`python -m diesel_fs.peers` runs a master (`master/daemon.py`)."""

import sys

from .master.daemon import main

if __name__ == "__main__":
    sys.exit(main())
