"""Checks every row of a table in one test, and names each row that fails.

`each_row` takes the place of `pytest.mark.parametrize` if rows are cheap: to collect, distribute
and report a test for each of them would cost more than the rows do.
"""

import functools
import inspect
import reprlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import ParamSpec, TypeVar, cast

import pytest

P = ParamSpec("P")
Result = TypeVar("Result")
Values = dict[str, object]

_OUTCOMES = (pytest.fail.Exception, pytest.skip.Exception)
"""These are not derived from `Exception`. A skipped row counts as failed, since its absence would
go unnoticed.
"""


class RowsFailed(AssertionError):
    def __init__(self, failures: list[tuple[str, BaseException]]) -> None:
        lines = [f"{name}: {_first_line(error)}" for name, error in failures]
        super().__init__("\n".join([f"rows that failed: {len(failures)}", *lines]))
        self.failures = failures


def each_row(
    names: str | Sequence[str], rows: Iterable[object], ids: Sequence[str] = ()
) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Call the test for each row. The first failure is shown whole, each other one in one line.

    The arguments are those of `parametrize`; without `ids`, its values name a row. Each row has a
    new `tmp_path`, and its `monkeypatch`, `caplog` and `capsys` are not shared with other rows. The
    rows share all other fixtures, so this is not for rows that change one.
    """
    parts = [each.strip() for each in (names.split(",") if isinstance(names, str) else names)]
    rows = list(rows)
    table = [(name, _values(parts, row)) for name, row in zip(ids or rows, rows, strict=True)]

    def decorate(test: Callable[P, Result]) -> Callable[P, Result]:
        @functools.wraps(test)
        def run(*args: P.args, **fixtures: P.kwargs) -> None:
            __tracebackhide__ = True
            with _failing_rows(table) as failures:
                for number, (name, values) in enumerate(table):
                    with _row(failures, number, name), _fresh(fixtures, number) as own:
                        test(*args, **{**fixtures, **own, **values})  # type: ignore[arg-type]

        @functools.wraps(test)
        async def run_in_trio(*args: P.args, **fixtures: P.kwargs) -> None:
            __tracebackhide__ = True
            with _failing_rows(table) as failures:
                for number, (name, values) in enumerate(table):
                    with _row(failures, number, name), _fresh(fixtures, number) as own:
                        await test(*args, **{**fixtures, **own, **values})  # type: ignore[arg-type, misc]

        whole = inspect.signature(test)
        rest = [each for name, each in whole.parameters.items() if name not in parts]
        chosen = run_in_trio if inspect.iscoroutinefunction(test) else run
        setattr(chosen, "__signature__", whole.replace(parameters=rest))  # noqa: B010
        return cast(Callable[P, Result], chosen)

    return decorate


Failures = list[tuple[str, BaseException]]


@contextmanager
def _failing_rows(table: Sequence[object]) -> Iterator[Failures]:
    assert table, "the table has no rows"
    failures: Failures = []
    yield failures
    if failures:
        raise RowsFailed(failures) from failures[0][1]


@contextmanager
def _row(failures: Failures, number: int, name: object) -> Iterator[None]:
    place = f"row {number}, {_NAMES.repr(name)}"
    try:
        yield
    except RowsFailed as inner:  # of a table within this one
        failures += [(f"{place}, {row}", error) for row, error in inner.failures]
    except (Exception, *_OUTCOMES) as error:
        failures.append((place, error))


_WITH_MARKS = type(pytest.param())


def _values(names: list[str], row: object) -> Values:
    values = [row] if len(names) == 1 else row
    assert isinstance(values, list | tuple), row
    assert not isinstance(row, _WITH_MARKS), "pytest.mark.parametrize takes rows with marks"
    return dict(zip(names, values, strict=True))


@contextmanager
def _fresh(fixtures: Mapping[str, object], number: int) -> Iterator[Values]:
    own: Values = {}
    if isinstance(path := fixtures.get("tmp_path"), Path):
        own["tmp_path"] = path / str(number)
        (path / str(number)).mkdir()
    if isinstance(log := fixtures.get("caplog"), pytest.LogCaptureFixture):
        log.clear()
    if isinstance(output := fixtures.get("capsys"), pytest.CaptureFixture):
        output.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        if "monkeypatch" in fixtures:
            own["monkeypatch"] = patch
        yield own


class _Names(reprlib.Repr):
    """Shows a row's values in short, and functions by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 60

    def repr_function(self, function: FunctionType, level: int) -> str:
        return function.__name__


_NAMES = _Names()


def _first_line(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return traceback.format_exception_only(error)[0].splitlines()[0]
