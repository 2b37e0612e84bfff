"""Chooses the units that leave a full cache for a new one: the loop that all caches share. Pure.

`Shortage` takes victims out of one or several orders of eviction (`eviction.py`, `lrfu.py`) until
there is room. Nothing is evicted here: the cache must still decide whether the new unit is worth
its victims (`EvictionPolicy.replaces`, `admission.py`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Unit = TypeVar("Unit")


@dataclass(slots=True)
class Shortage(Generic[Unit]):
    bytes: int
    """The bytes that are lacking; 0 or less if there is room."""
    units: int = 0
    """The same as a number of units, if the cache limits their number."""
    victims: list[Unit] = field(default_factory=list)

    @property
    def is_met(self) -> bool:
        return self.bytes <= 0 and self.units <= 0

    def choose(
        self,
        candidates: Iterable[Unit],
        size_of: Callable[[Unit], int],
        stays: Callable[[Unit], bool] | None = None,
    ) -> bool:
        """Choose further victims, the first candidates first. Returns `is_met`. Passes over
        candidates that were chosen before or that stay (`stays`: pinned ones, for example)."""
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
