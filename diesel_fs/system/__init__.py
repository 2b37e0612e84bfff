"""Services of the operating system, and programs that DIESEL-FS starts in the background.

Each module can be read by itself: `atomic_file.py` (files that are written whole or not at all),
`available_memory.py`, `mountinfo.py`, `syscalls.py` (system calls that Python lacks),
`loop_devices.py` (block devices that show a file), `unix_sockets.py` (sockets at paths of any
length), `daemons.py` (starts a background program and waits for its report; it uses
`atomic_file.py`), `vectored_io.py` and `log_limit.py`. They know nothing of datasets, chunks or
stores.
"""
