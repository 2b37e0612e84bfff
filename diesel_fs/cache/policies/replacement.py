"""Chooses the units that leave a full cache for a new one: the loop that all caches share.

A policy (`eviction.py`, `lrfu.py`) gives the order in which units may leave; the cache knows which
of them cannot leave now: pinned ones, for example. `Shortage` takes victims out of such orders, one
order after the other, until there is room. Nothing is evicted here: the cache must still decide
whether the new unit is worth its victims (`EvictionPolicy.replaces`, `admission.py`). Pure.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Unit = TypeVar("Unit")


@dataclass(slots=True)
class Shortage(Generic[Unit]):
    """The room that a new unit lacks, and the victims that have been chosen for it."""

    bytes: int
    """The bytes that are lacking; 0 or less if there is room."""
    units: int = 0
    """How many units must leave because the cache limits their number; 0 or less if none must."""
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
        `is_met`. Passes over candidates that were chosen before or for which `stays` is true."""
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
