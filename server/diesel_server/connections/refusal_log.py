"""The log of refusals: one line for each connection, login or request that the server refuses.

No line has a secret key. The lines about one network are limited, so that a client that tries all
night does not fill the disk; the next line has the number of those left out. The metrics count
every refusal. For one event loop.
"""

import logging
from collections import Counter

import trio

from diesel_fs.metrics import MetricCells
from diesel_fs.net.messages import Message

from ..limits import Rate, RateLimiter, network_of

log = logging.getLogger("diesel.server")

LINE_RATE = Rate(20, 5.0)
"""A network may cause 20 lines at once, then one in 5 s (`limits.network_of`)."""

NETWORKS_MAX = 1024
"""Beyond this number, the network that was silent longest is forgotten. If lines about more of them
are left out, all counts of left-out lines are dropped: they only inform."""

_TEXT_MAX = 64
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-:[]%")


class RefusalLog:
    def __init__(self, cells: MetricCells) -> None:
        self._cells = cells
        self._lines = RateLimiter(LINE_RATE, trio.current_time, NETWORKS_MAX)
        self._left_out: Counter[str] = Counter()

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
        """`reason`, one of `metrics.REFUSALS`, is for the metrics, and `why`, a sentence, for the
        log."""
        self._cells.add("diesel_refusals_total", reason)
        left_out = self._take_line(address)
        if left_out is None:
            return
        fields = (("user", user), ("from", address), ("do", do), ("dataset", dataset))
        words = " ".join(f"{name}={_plain(value)}" for name, value in fields)
        more = f" ({left_out} lines about this network left out)" if left_out else ""
        log.warning("refused %s why=%r%s", words, why[:256], more)

    def _take_line(self, address: str) -> int | None:
        """Returns the number of left-out lines about this network; None if this line is left out,
        too."""
        network = network_of(address.rpartition(":")[0] or address)
        if self._lines.is_full(network):
            if len(self._left_out) >= NETWORKS_MAX:
                self._left_out.clear()
            self._left_out[network] += 1
            return None
        self._lines.add(network)
        return self._left_out.pop(network, 0)


def dataset_in(message: Message) -> str:
    name, identity = message.get("dataset"), message.get("identity")
    if type(name) is str:
        return name
    return identity.hex() if type(identity) is bytes else ""


def _plain(value: str) -> str:
    """The result cannot end the line, or look like another field."""
    short = value[:_TEXT_MAX]
    if not short:
        return "-"
    return short if _PLAIN.issuperset(short) else repr(short)
