"""Findings, their order, and the summary. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

State = Literal["fault", "warning", "ok"]
"""A job fails or runs badly with a fault; it runs with a warning."""

STATES: Sequence[State] = ("fault", "warning", "ok")

Figure = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    """A name that programs may rely on, such as `fuse.device`."""
    state: State
    found: str
    cure: str = ""
    figures: Mapping[str, Figure] = field(default_factory=dict)

    def described(self) -> dict[str, object]:
        return {
            "check": self.check,
            "state": self.state,
            "found": self.found,
            "cure": self.cure,
            "figures": dict(self.figures),
        }


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda each: STATES.index(each.state))


def counts(findings: Sequence[Finding]) -> dict[str, int]:
    return {state: sum(each.state == state for each in findings) for state in STATES}


def finding_lines(findings: Sequence[Finding]) -> Iterator[str]:
    width = max((len(each.check) for each in findings), default=0)
    for each in in_order(findings):
        yield f"{each.state:<7}  {each.check:<{width}}  {each.found}"
        if each.cure:
            yield f"{'':<7}  {'':<{width}}  do: {each.cure}"


def summary(findings: Sequence[Finding]) -> str:
    count = counts(findings)
    parts = [
        f"{count[state]} {state}{'' if count[state] == 1 else 's'}"
        for state in STATES[:2]
        if count[state]
    ]
    found = f" ({' and '.join(parts)})" if parts else ""
    return f"a job would {'not ' if count['fault'] else ''}run well here{found}"
