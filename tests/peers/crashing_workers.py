"""Client processes that die during a read. Arguments: `SOCKET IDENTITY VERSION COUNT`.

Each process says hello, sends a request, and exits before it has the answer, each at another
point. The program implements section 4 of PEERS.md by itself.
"""

import array
import os
import signal
import socket
import struct
import sys
from fcntl import F_ADD_SEALS, F_SEAL_SHRINK, fcntl

_HEAD = struct.Struct("<BBHIII")
_WINDOW_BYTES = 1 << 20
_AT_ONCE = 8


def worker(path: str, identity: bytes, version: int, number: int) -> None:
    link = socket.socket(socket.AF_UNIX)
    link.connect(path)
    window = os.memfd_create("window", os.MFD_ALLOW_SEALING)
    os.ftruncate(window, _WINDOW_BYTES)
    fcntl(window, F_ADD_SEALS, F_SEAL_SHRINK)
    body = struct.pack("<HH16sQ", 1, 0, identity, version)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [window]))]
    link.sendmsg([_HEAD.pack(1, 0, 0, 0, len(body), 0) + body], rights)
    kind = number % 5
    if kind == 0:  # before the answer to its hello
        return
    link.recv(64)
    parts = b"".join(struct.pack("<III", 0, at * 100, 100) for at in range(50))
    read = _HEAD.pack(2, 0, 0, 50, len(parts), 0) + parts
    pin = _HEAD.pack(3, 1, 0, 1, 4, 0) + struct.pack("<I", 0)
    if kind == 1:
        link.sendall(read)
    elif kind == 2:
        link.sendall(read[: len(read) // 2])
    elif kind == 3:
        link.sendall(pin)
    else:  # after it has a chunk, and has requested more
        link.sendall(pin)
        link.recvmsg(64, 64)
        link.sendall(read)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    path, identity, version, count = sys.argv[1:]
    alive = 0
    for number in range(int(count)):
        if not os.fork():
            try:
                worker(path, bytes.fromhex(identity), int(version), number)
            finally:
                os._exit(1)
        alive += 1
        if alive == _AT_ONCE:
            os.wait()
            alive -= 1
    for _ in range(alive):
        os.wait()


if __name__ == "__main__":
    main()
