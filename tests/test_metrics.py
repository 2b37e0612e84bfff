"""The metrics of a server: counting in several processes, and the text for Prometheus."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from diesel_fs import metrics
from diesel_fs.metrics import MetricCells, cells_bytes, exposition, private_cells

from .rows import each_row

LINE = re.compile(
    r"# (HELP \S+ .+|TYPE \S+ (counter|gauge|histogram))"
    r'|[a-z_]+({[a-z_]+="[^"]*"(,[a-z_]+="[^"]*")*})?'
    r" (\d+|\d+\.\d+(e-\d+)?)"
)


def value(page: str, line: str) -> float:
    (found,) = re.findall(rf"^{re.escape(line)} (\S+)$", page, re.MULTILINE)
    return float(found)


def test_the_text_has_the_format_of_Prometheus() -> None:
    cells = private_cells()
    cells.add("diesel_requests_total", "read", "ok")
    cells.observe("diesel_request_seconds", "read", value=0.003)
    page = exposition([cells])
    assert page.endswith("\n")
    for line in page.splitlines():
        assert LINE.fullmatch(line), line
    names = re.findall(r"^# TYPE (\S+)", page, re.MULTILINE)
    assert names == [metric.name for metric in metrics.TABLE]
    samples = [line.rpartition(" ")[0] for line in page.splitlines() if line[0] != "#"]
    assert len(samples) == len(set(samples))


def test_a_total_is_the_sum_over_processes() -> None:
    memory = memoryview(bytearray(2 * cells_bytes()))
    first, second = (
        MetricCells(memory[i * cells_bytes() : (i + 1) * cells_bytes()]) for i in range(2)
    )
    first.add("diesel_commits_total", amount=2)
    second.add("diesel_commits_total", amount=3)
    second.add("diesel_refusals_total", "login")
    assert first.get("diesel_commits_total") == 2
    page = exposition([first, second])
    assert value(page, "diesel_commits_total") == 5
    assert value(page, 'diesel_refusals_total{reason="login"}') == 1


@each_row(
    ("seconds", "buckets"),
    [(0.0, 9), (0.0005, 9), (0.0006, 8), (1.0, 4), (29.0, 2), (31.0, 1)],
)
def test_the_buckets_of_a_histogram_are_cumulative(seconds: float, buckets: int) -> None:
    cells = private_cells()
    cells.observe("diesel_request_seconds", "put", value=seconds)
    page = exposition([cells])
    found = re.findall(r'^diesel_request_seconds_bucket{do="put",.*} (\d+)$', page, re.MULTILINE)
    assert found == ["0"] * (9 - buckets) + ["1"] * buckets
    assert value(page, 'diesel_request_seconds_count{do="put"}') == 1
    assert value(page, 'diesel_request_seconds_sum{do="put"}') == pytest.approx(seconds)


def test_unlisted_label_values_make_no_new_lines() -> None:
    cells = private_cells()
    before = len(exposition([cells]).splitlines())
    for name in ('x"} 1\nevil 2', "a" * 10_000, ""):
        cells.add("diesel_requests_total", name, "ok")
        cells.observe("diesel_request_seconds", name, value=1)
    page = exposition([cells])
    assert len(page.splitlines()) == before
    assert value(page, 'diesel_requests_total{do="other",outcome="ok"}') == 3
    assert "evil" not in page


def test_another_process_continues_counting_in_the_same_cells() -> None:
    memory = memoryview(bytearray(cells_bytes()))
    before = MetricCells(memory)
    before.add("diesel_logins_total")
    before.set("diesel_connections", value=7)
    before.clear_gauges()
    after = MetricCells(memory)
    after.add("diesel_logins_total")
    assert value(exposition([before]), "diesel_logins_total") == 2
    assert value(exposition([before]), "diesel_connections") == 0


def test_threads_lose_no_count() -> None:
    cells = private_cells()

    def count(_: int) -> None:
        for _ in range(500):
            cells.add("diesel_commits_total")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(count, range(8)))
    assert cells.get("diesel_commits_total") == 4000
