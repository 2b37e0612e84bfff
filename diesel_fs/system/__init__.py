"""Services of the operating system, and programs that DIESEL-FS starts in the background.

Start with `atomic_file.py` (files that are written whole or not at all), `syscalls.py` (system
calls that Python lacks) and `daemons.py` (starts a background program and waits for its report).
No module here knows datasets, chunks or stores.
"""
