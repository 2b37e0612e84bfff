"""Lets `python -m dlcmd` run the command line."""

from dlcmd.main import main

if __name__ == "__main__":
    main()
