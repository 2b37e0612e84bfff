"""Which units leave a full cache for a new one: the loop that all caches share.

A policy (`eviction.py`, `lrfu.py`) says in which order units may leave, and the cache which of them
cannot leave now: pinned ones, for example. `Shortage` takes victims out of such orders, one order
after the other, until there is room. Nothing is evicted here: a cache first asks whether the new
unit is worth its victims (`EvictionPolicy.replaces`, `admission.py`). Pure.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Unit = TypeVar("Unit")


@dataclass(slots=True)
class Shortage(Generic[Unit]):
    """The room that a new unit lacks, and the victims that have been chosen for it."""

    bytes: int
    """Not above 0 if there is room enough."""
    units: int = 0
    """The number of units above the limit of their number."""
    victims: list[Unit] = field(default_factory=list)

    @property
    def is_met(self) -> bool:
        """Whether the new unit has room once the victims have left."""
        return self.bytes <= 0 and self.units <= 0

    def choose(
        self,
        candidates: Iterable[Unit],
        size_of: Callable[[Unit], int],
        stays: Callable[[Unit], bool] | None = None,
    ) -> bool:
        """Choose further victims, the first candidates first, until nothing is lacking; returns
        `is_met`. Candidates that were chosen before, or that `stays` names, are passed over."""
        chosen = {*self.victims}
        if not self.is_met:
            for each in candidates:
                if each not in chosen and not (stays is not None and stays(each)):
                    self.victims.append(each)
                    self.bytes -= size_of(each)
                    self.units -= 1
                    if self.is_met:
                        break
        return self.is_met
