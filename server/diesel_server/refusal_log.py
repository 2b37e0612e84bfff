"""The log of refusals: one line for each connection, login or request that the server refuses.

A line has the user, the address, the request, the dataset and the reason, and never a key. A client
that tries all night does not fill the disk: after some lines of one network the others are left
out, and the next line says how many they were. Every refusal is counted in the metrics.

Runs in the event loop of one worker.
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
NETWORKS_MAX = 1024
"""Networks whose lines are counted; those that were silent longest are forgotten."""

_TEXT_MAX = 64
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-:[]%")


@dataclass(slots=True)
class _Network:
    """A token bucket: each line takes one of `tokens`, which grow back at `LINES_PER_S`."""

    seen_s: float
    tokens: float = LINES_AT_ONCE
    left_out: int = 0


class RefusalLog:
    """The log of refusals of one worker."""

    def __init__(self, cells: MetricCells) -> None:
        self._cells = cells
        self._networks: OrderedDict[str, _Network] = OrderedDict()

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
        """Log and count one refusal; `reason` is one of `metrics.REFUSALS`."""
        self._cells.add("diesel_refusals_total", reason)
        left_out = self._take_line(address)
        if left_out is None:
            return
        fields = (("user", user), ("from", address), ("do", do), ("dataset", dataset))
        words = " ".join(f"{name}={_plain(value)}" for name, value in fields)
        more = f" ({left_out} lines about this network left out)" if left_out else ""
        log.warning("refused %s why=%r%s", words, why[:256], more)

    def _take_line(self, address: str) -> int | None:
        """How many lines were left out before this one; None where this one is left out, too."""
        key = network_of(address.rpartition(":")[0] or address)
        now_s = trio.current_time()
        found = self._networks.setdefault(key, _Network(now_s))
        self._networks.move_to_end(key)
        if len(self._networks) > NETWORKS_MAX:
            self._networks.popitem(last=False)
        gained = (now_s - found.seen_s) * LINES_PER_S
        found.tokens = min(LINES_AT_ONCE, found.tokens + gained)
        found.seen_s = now_s
        if found.tokens < 1:
            found.left_out += 1
            return None
        found.tokens -= 1
        left_out, found.left_out = found.left_out, 0
        return left_out


def dataset_in(message: Message) -> str:
    """The name or identity of the dataset in a request, for the log."""
    name, identity = message.get("dataset"), message.get("identity")
    if type(name) is str:
        return name
    return identity.hex() if type(identity) is bytes else ""


def _plain(value: str) -> str:
    """A value that cannot end its line or pretend to be another field."""
    short = value[:_TEXT_MAX]
    return short if short and _PLAIN.issuperset(short) else repr(short) if short else "-"
