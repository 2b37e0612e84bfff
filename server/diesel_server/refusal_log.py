"""What the log says of clients that are refused: who, from where, what, why; never a key.

Owned here: the line, and how many there are. A client that knocks all night fills no disk: after
some lines of one address the rest are counted, and the next line says how many they were.

Concurrency: the loop's thread alone.
"""

import logging
from collections import OrderedDict
from dataclasses import dataclass

import trio

from diesel_fs.metrics import MetricCells
from diesel_fs.net.messages import Message

from .limits import network_of

log = logging.getLogger("diesel.server")

LINES_AT_ONCE = 20
LINES_PER_S = 0.2
ADDRESSES_MAX = 1024
"""Of so many addresses it is known how much they knocked; the longest silent are forgotten."""

_TEXT_MAX = 64
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-:[]%")


@dataclass(slots=True)
class _Address:
    seen_s: float
    allowance: float = LINES_AT_ONCE
    left_out: int = 0


class RefusalLog:
    """The log of refusals of one worker."""

    def __init__(self, cells: MetricCells) -> None:
        self._cells = cells
        self._addresses: OrderedDict[str, _Address] = OrderedDict()

    def add(
        self,
        reason: str,
        why: str,
        *,
        address: str,
        user: str = "",
        do: str = "",
        dataset: str = "",
    ) -> None:
        """One refusal; `reason` is one of the metrics' words."""
        self._cells.add("diesel_refusals_total", reason)
        left_out = self._let_through(address)
        if left_out < 0:
            return
        fields = (("user", user), ("from", address), ("do", do), ("dataset", dataset))
        words = " ".join(f"{name}={_plain(value)}" for name, value in fields)
        more = f" ({left_out} more of this address left out)" if left_out else ""
        log.warning("refused %s why=%r%s", words, why[:256], more)

    def _let_through(self, address: str) -> int:
        """How many lines were left out before this one; -1 where this one is, too."""
        host = network_of(address.rpartition(":")[0] or address)
        now = trio.current_time()
        found = self._addresses.setdefault(host, _Address(now))
        self._addresses.move_to_end(host)
        if len(self._addresses) > ADDRESSES_MAX:
            self._addresses.popitem(last=False)
        gained = (now - found.seen_s) * LINES_PER_S
        found.allowance = min(LINES_AT_ONCE, found.allowance + gained)
        found.seen_s = now
        if found.allowance < 1:
            found.left_out += 1
            return -1
        found.allowance -= 1
        left_out, found.left_out = found.left_out, 0
        return left_out


def dataset_in(message: Message) -> str:
    """How a request names its dataset, for the log."""
    name, identity = message.get("dataset"), message.get("identity")
    if type(name) is str:
        return name
    return identity.hex() if type(identity) is bytes else ""


def _plain(value: str) -> str:
    """A value that cannot end its line or pretend to be another field."""
    short = value[:_TEXT_MAX]
    return short if short and _PLAIN.issuperset(short) else repr(short) if short else "-"
