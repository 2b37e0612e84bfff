"""`python -m diesel_fs.peers` runs a master (`daemon.py`)."""

import sys

from .daemon import main

if __name__ == "__main__":
    sys.exit(main())
