"""The two tiers of tests: most rows of a costly table are for the deep one."""

from collections.abc import Iterable

import pytest


def fast_first(rows: Iterable[object], fast: int = 1) -> list[object]:
    """Rows for `parametrize` or a fixture's `params`: the first `fast` of them run in the fast
    tier, all others are marked `deep`."""
    rows = list(rows)
    assert 0 < fast < len(rows), "all rows would be of one tier"
    return [*rows[:fast], *(_deep(row) for row in rows[fast:])]


def _deep(row: object) -> object:
    if isinstance(row, type(pytest.param())):
        return pytest.param(*row.values, marks=[*row.marks, pytest.mark.deep], id=row.id)
    values = row if isinstance(row, tuple) else (row,)
    return pytest.param(*values, marks=pytest.mark.deep)
