"""`python -m dlcmd`."""

from dlcmd.main import main

if __name__ == "__main__":
    main()
