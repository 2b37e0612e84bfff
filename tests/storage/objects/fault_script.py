"""A script of planned faults. Each must happen as often as planned: a test without its fault proves
nothing, so it fails.
"""

import threading
from dataclasses import dataclass, field
from typing import Generic, Self, TypeVar


@dataclass(slots=True)
class PlannedFault:
    """A fault of the next `times` operations of this name on objects with `where` in their name, or
    of all of them if `times` is None. The first `skip` of these operations are left alone."""

    operation: str
    where: str = ""
    skip: int = field(default=0, kw_only=True)
    times: int | None = field(default=1, kw_only=True)
    seen: int = field(default=0, init=False)
    hits: int = field(default=0, init=False)

    @property
    def happened(self) -> bool:
        return self.hits > 0 if self.times is None else self.hits == self.times


F = TypeVar("F", bound=PlannedFault)


class FaultScript(Generic[F]):
    """Faults, in a `with` that checks them at its end. The first fault that matches happens."""

    def __init__(self, *script: F) -> None:
        self.script = script
        self._script_lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            self.plan()

    def plan(self, *script: F) -> None:
        """Begin another script. All faults of the one before must have happened."""
        missed = [fault for fault in self.script if not fault.happened]
        assert not missed, f"faults that did not hit as often as planned: {missed}"
        self.script = script

    def next_fault(self, operation: str, name: str) -> F | None:
        with self._script_lock:
            for fault in self.script:
                if fault.operation != operation or fault.where not in name:
                    continue
                fault.seen += 1
                is_left = fault.times is None or fault.hits < fault.times
                if fault.seen > fault.skip and is_left:
                    fault.hits += 1
                    return fault
        return None
