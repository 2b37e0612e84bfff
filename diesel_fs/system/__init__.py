"""What DIESEL-FS asks of the operating system, and the programs that it starts in the background.

Each module can be read by itself: `atomic_file` (files that are written whole or not at all, under
names that users give), `available_memory` (how much memory a program may take), `mountinfo` (what
is mounted where), `syscalls` (system calls that Python lacks), `unix_sockets` (sockets at paths of
any length), `daemons` (starting a background program and hearing whether it came up; it uses
`atomic_file`), and `log_limit` (at most one line a second from one place in the code). They know
nothing of datasets, chunks or stores.
"""
