"""What DIESEL-FS asks of the operating system, and the programs that it starts in the background.

Each module can be read by itself: `atomic_file.py` (files that are written whole or not at all,
under names that users give), `available_memory.py` (how much memory a program may take),
`mountinfo.py` (what is mounted where), `syscalls` (system calls that Python lacks), `loop_devices`
(block devices that show a file), `unix_sockets` (sockets at paths of any length), `daemons.py`
(starting a background program and hearing whether it came up; it uses `atomic_file.py`), and
`log_limit.py` (at most one line a second from one place in the code). They know nothing of
datasets, chunks or stores.
"""
