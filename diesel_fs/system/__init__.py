"""Services of the operating system, and programs that DIESEL-FS starts in the background.

Each module can be read by itself; start with `atomic_file.py` (files that are written whole or not
at all), `syscalls.py` (system calls that Python lacks) and `daemons.py` (starts a background
program and waits for its report). They know nothing of datasets, chunks or stores.
"""
