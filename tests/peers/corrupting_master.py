"""A master that sends wrong bytes to other masters, as the environment says:

    LIES=flipped|zeros|another python -m tests.peers.corrupting_master TASK

Everything else is the real master: its cache, its registration, and what its own clients get.
"""

import os
import sys

from diesel_fs.peers.daemon import main
from diesel_fs.peers.master import Master
from diesel_fs.peers.wire import Parts

Held = list[memoryview]

_answer_now, _answer = Master.answer_from_memory, Master.answer


def corrupted(contents: Held) -> Held:
    """As many bytes as were asked for, but wrong ones."""
    match os.environ["LIES"]:
        case "flipped":
            return [memoryview(bytes([each[0] ^ 1]) + bytes(each[1:])) for each in contents]
        case "zeros":
            return [memoryview(bytes(len(each))) for each in contents]
    whole = b"".join(contents)  # bytes of other files, or of this one at another place
    ring = whole[len(whole) // 2 + 1 :] + whole
    return [memoryview(ring[: len(each)].ljust(len(each), b"x")) for each in contents]


def answer_from_memory(self: Master, parts: Parts) -> Held | None:
    contents = _answer_now(self, parts)
    return None if contents is None else corrupted(contents)


async def answer(self: Master, rank: int, parts: Parts, *, load: bool) -> tuple[bytes, Held]:
    statuses, contents = await _answer(self, rank, parts, load=load)
    return statuses, corrupted(contents)


Master.answer_from_memory = answer_from_memory  # type: ignore[method-assign]  # that is the lie
Master.answer = answer  # type: ignore[method-assign]  # and here

if __name__ == "__main__":
    sys.exit(main())
