"""The tables of tests: all rows run, all failures are named, and no row fails unseen."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from .rows import RowsFailed, each_row


def failures(table: Callable[..., None]) -> list[str]:  # type: ignore[explicit-any]
    with pytest.raises(RowsFailed) as failed:
        table()
    assert failed.value.__cause__ is not None
    return str(failed.value).splitlines()


def test_all_rows_run_and_all_failures_are_named() -> None:
    ran = []

    @each_row("number, divisor", [(4, 2), (1, 0), (6, 3), [9, 3]])
    def table(number: int, divisor: int) -> None:
        ran.append(number)
        assert number / divisor == 2, "not two"

    assert failures(table) == [
        "rows that failed: 2",
        "row 1, (1, 0): ZeroDivisionError: division by zero",
        "row 3, [9, 3]: AssertionError: not two",
    ]
    assert ran == [4, 1, 6, 9]


async def test_the_rows_of_a_coroutine_run_in_trio() -> None:
    ran = []

    @each_row("number", [1, 2, 3])
    async def table(number: int) -> None:
        await trio.lowlevel.checkpoint()
        ran.append(number)
        assert number == 2

    with pytest.raises(RowsFailed, match="rows that failed: 2"):
        await table()  # type: ignore[call-arg]
    assert ran == [1, 2, 3]


def test_a_missing_error_a_group_of_errors_and_a_skip_are_failures() -> None:
    def raise_all(errors: list[BaseException]) -> None:
        if errors:
            raise BaseExceptionGroup("of a nursery", errors) if errors[1:] else errors[0]

    cases = [[ValueError("x")], [], [KeyError("x")] * 2, [pytest.skip.Exception("x")]]

    @each_row("errors", cases, ids=["right", "none", "two", "skip"])
    def table(errors: list[BaseException]) -> None:
        with pytest.raises(ValueError, match="x"):
            raise_all(errors)

    assert failures(table) == [
        "rows that failed: 3",
        "row 1, 'none': Failed: DID NOT RAISE ValueError",
        "row 2, 'two': KeyError: 'x'",
        "row 3, 'skip': Skipped: x",
    ]


def test_tables_within_tables_name_both_rows() -> None:
    @each_row("outer", [int, "a"])
    @each_row("inner", ["a", failures])
    def table(outer: object, inner: object) -> None:
        assert outer == inner, "differ"

    assert failures(table) == [
        "rows that failed: 3",
        "row 0, <class 'int'>, row 0, 'a': AssertionError: differ",
        "row 0, <class 'int'>, row 1, failures: AssertionError: differ",
        "row 1, 'a', row 1, failures: AssertionError: differ",
    ]


def test_a_table_without_rows_fails() -> None:
    @each_row("row", [])
    def table(row: object) -> None: ...

    with pytest.raises(AssertionError, match="no rows"):
        table()  # type: ignore[call-arg]


def test_a_row_of_another_form_is_refused() -> None:
    for row in ((1,), (1, 2, 3), 1, "12", pytest.param(1, 2)):
        with pytest.raises((AssertionError, ValueError)):
            each_row("first, second", [row])


@pytest.mark.parametrize("repeat", [1, 2])
@each_row("number", [0, 1])
def test_each_row_has_its_own_fixtures(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    number: int,
    repeat: int,
) -> None:
    (tmp_path / "new").mkdir()
    assert not hasattr(pytest, "patched")
    monkeypatch.setattr(pytest, "patched", True, raising=False)
    logging.getLogger("rows").warning("row %d", number)
    assert caplog.messages == [f"row {number}"]
    print(number * repeat)
    assert capsys.readouterr().out == f"{number * repeat}\n"
    print("left")
