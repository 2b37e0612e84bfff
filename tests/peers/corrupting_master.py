"""A master that sends wrong bytes to other nodes, as the environment says:

    LIES=flipped|zeros|another python -m tests.peers.corrupting_master TASK

Everything else is the real master: its cache, its registration, and what its own clients get.
"""

import os
import struct
import sys
from collections.abc import Sequence

from diesel_fs.format.entries import Bytes
from diesel_fs.peers.master.daemon import main
from diesel_fs.peers.master.data_plane import DataPlane, ServedConnection

_HEAD = struct.Struct("<IBBHII")
_send, _adopt = DataPlane._send, DataPlane._adopt


def corrupted(payload: bytes) -> bytes:
    match os.environ["LIES"]:
        case "flipped":
            lie = bytearray(payload)
            lie[::500] = bytes(each ^ 1 for each in lie[::500])  # in each file
            return bytes(lie)
        case "zeros":
            return bytes(len(payload))
    middle = len(payload) // 2 + 1  # bytes of other files, or of this one at another place
    return payload[middle:] + payload[:middle]


def lie(answer: bytes) -> bytes:
    _, _, _, _, count, _ = _HEAD.unpack_from(answer)
    start = _HEAD.size + count
    return answer[:start] + corrupted(answer[start:])


def send(self: DataPlane, connection: ServedConnection, parts: Sequence[Bytes], size: int) -> None:
    if connection.is_local:
        _send(self, connection, parts, size)
        return
    answer = lie(b"".join(parts))
    assert len(answer) == size
    _send(self, connection, [answer], size)


def adopt(self: DataPlane, connection: ServedConnection) -> None:
    """Immediate answers to other nodes do not leave by `_send`."""
    if not connection.is_local:
        send_one, send_many = connection.send, connection.send_many
        connection.send = lambda answer: send_one(lie(bytes(answer)))
        connection.send_many = lambda parts: send_many([lie(b"".join(parts))])
    _adopt(self, connection)


DataPlane._send = send  # type: ignore[method-assign]  # that is the lie
DataPlane._adopt = adopt  # type: ignore[method-assign]  # and here

if __name__ == "__main__":
    sys.exit(main())
