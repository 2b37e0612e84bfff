"""Prints the state that a program finds when it starts, as JSON; `test_zygote.py` compares it."""

import json
import os
import resource
import signal
import sys
from pathlib import Path

NAMES = ("cmdline", "environ", "comm")
LISTING = f"/proc/{os.getpid()}/fd"

if __name__ == "__main__":
    with os.scandir("/proc/self/fd") as listing:
        files = sorted(int(each.name) for each in listing if os.readlink(each) != LISTING)
    streams = (sys.stdin, sys.stdout, sys.stderr)
    handlers = {int(each): signal.getsignal(each) for each in signal.valid_signals()}
    found = {
        "argv": sys.argv,
        "path": sys.path,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "shown": [
            Path(f"/proc/self/{name}").read_bytes().decode("latin-1")
            for name in ("cmdline", "environ", "comm")
        ],
        "open": files[:-1],  # the last is that of the listing
        "inherited": [number for number in files[:-1] if os.get_inheritable(number)],
        "umask": os.umask(0),
        "leads": os.getsid(0) == os.getpid(),
        "ignored": [each for each, handler in handlers.items() if handler is signal.SIG_IGN],
        "handled": {each: str(handler) for each, handler in handlers.items() if callable(handler)},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "limits": [resource.getrlimit(number) for number in range(16)],
        "encodings": [(each.encoding, each.errors) for each in streams],
        "flushes": [each.line_buffering for each in streams],
        "threads": len(os.listdir("/proc/self/task")),
        "users": [os.getresuid(), os.getresgid()],
        "input": sys.stdin.read(),
    }
    print(json.dumps(found, default=str))
