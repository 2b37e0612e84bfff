"""How long readers wait, and for what: the bookkeeping, without a mount."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.cache.waiting import WaitCause
from diesel_fs.mounts.statistics.reader_groups import ReaderProcesses, reader_group
from diesel_fs.mounts.statistics.waits import (
    CAUSE_NAMES,
    READERS_MAX,
    UNSEEN,
    ReaderGroup,
    Wait,
    Waits,
)
from tests.clocks import ManualClock
from tests.mounts.observed import figures
from tests.waiting import wait_until

GROUPS = [ReaderGroup(0, 100, "train"), ReaderGroup(1, 200, "train"), ReaderGroup(None, 300, "cat")]
OURS = 9
"""The thread of a process of the mount itself."""

MARKED = [cause for cause in WaitCause if cause not in (WaitCause.MOUNT, WaitCause.METADATA)]


def group_of(thread: int) -> ReaderGroup | None:
    return None if thread == OURS else GROUPS[thread % len(GROUPS)]


Tick = list[tuple[ReaderGroup, WaitCause]]
"""The oracle for one unit of time: the cause that each request waits for."""


def shares(ticks: list[Tick], group: ReaderGroup | None) -> dict[str, float]:
    found = dict.fromkeys(CAUSE_NAMES, 0.0)
    for tick in ticks:
        causes = [cause for of, cause in tick if group in (None, of)]
        for cause in causes:
            found[cause.name.lower()] += 1 / len(causes)
    return found


def sums(ticks: list[Tick], group: ReaderGroup | None) -> dict[str, float]:
    found = dict.fromkeys(CAUSE_NAMES, 0.0)
    for tick in ticks:
        for of, cause in tick:
            if group in (None, of):
                found[cause.name.lower()] += 1
    return found


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), st.integers(1, 5)),
        st.tuples(st.just("answer"), st.integers(1, OURS), st.integers(0, 3), st.booleans()),
        st.tuples(st.just("begin"), st.integers(1, OURS), st.booleans()),
        st.tuples(st.just("mark"), st.integers(0, 20), st.sampled_from(MARKED)),
        st.tuples(st.just("unmark"), st.integers(0, 20)),
        st.tuples(st.just("end"), st.integers(0, 20)),
        st.tuples(st.just("look")),
    ),
    max_size=40,
)


def readers_in(figures: Mapping[str, object]) -> list[dict[str, int]]:
    return cast("list[dict[str, int]]", figures["readers"])


class Model:
    def __init__(self) -> None:
        self.clock = ManualClock(1000.0)
        self.waits = Waits(group_of, now=self.clock)
        self.ticks: list[Tick] = []
        self.waiting: list[tuple[Wait, ReaderGroup | None, WaitCause, list[WaitCause]]] = []

    def pass_time(self, units: int, also: tuple[ReaderGroup | None, WaitCause] | None) -> None:
        for _ in range(units):
            tick: Tick = []
            now = [(group, max([base, *marks])) for _, group, base, marks in self.waiting]
            for group, cause in [*now, *([also] if also else [])]:
                if group is not None:
                    tick.append((group, cause))
            self.ticks.append(tick)
            self.clock.now_s += 1

    def run(self, step: tuple[object, ...]) -> None:
        match step:
            case ("pass", int(units)):
                self.pass_time(units, None)
            case ("answer", int(thread), int(units), bool(is_read)):
                cause = WaitCause.MOUNT if is_read else WaitCause.METADATA
                begun_s = self.clock()
                self.pass_time(units, (group_of(thread), cause))
                self.waits.answered(thread, cause, begun_s)
            case ("begin", int(thread), bool(is_read)):
                cause = WaitCause.MOUNT if is_read else WaitCause.METADATA
                wait = self.waits.begin(thread, cause, self.clock())
                self.waiting.append((wait, group_of(thread), cause, []))
            case ("mark", int(number), WaitCause() as cause) if self.waiting:
                wait, _, _, marks = self.waiting[number % len(self.waiting)]
                wait.enter(cause)
                marks.append(cause)
            case ("unmark", int(number)) if self.waiting:
                wait, _, _, marks = self.waiting[number % len(self.waiting)]
                if marks:
                    wait.leave(marks.pop(number % len(marks)))
            case ("end", int(number)) if self.waiting:
                wait, _, _, marks = self.waiting.pop(number % len(self.waiting))
                self.waits.end(wait)
                for cause in marks:  # a late thread changes nothing
                    wait.leave(cause)
            case ("look",):
                self.check()

    def check(self) -> None:
        figures = self.waits.figures()
        self.check_one(figures, None)
        for each in readers_in(figures):
            group = ReaderGroup(each["rank"], each["pid"], str(each["command"]))
            self.check_one(each, group)

    def check_one(self, figures: Mapping[str, object], group: ReaderGroup | None) -> None:
        expected = shares(self.ticks, group)
        assert figures["causes_s"] == pytest.approx(expected, abs=1e-4)
        assert figures["requests_s"] == pytest.approx(sums(self.ticks, group), abs=1e-4)
        assert figures["waited_s"] == pytest.approx(sum(expected.values()), abs=1e-4)
        waiting = [of for _, of, _, _ in self.waiting if of is not None]
        assert figures["waiting"] == sum(group in (None, of) for of in waiting)


@given(STEPS)
def test_each_moment_is_divided_among_waiting_requests(steps: list[tuple[object, ...]]) -> None:
    """Requests overlap in any way; the oracle counts unit by unit. The mount's own requests count
    nowhere."""
    model = Model()
    for step in steps:
        model.run(step)
    model.check()


def test_decompression_has_its_own_figure_in_immediate_answers() -> None:
    clock = ManualClock(1000.0)
    waits = Waits(group_of, now=clock)
    begun_s = clock()
    waits.inline.enter(WaitCause.DECOMPRESSION)
    clock.now_s += 3
    waits.inline.leave(WaitCause.DECOMPRESSION)
    clock.now_s += 1
    waits.answered(0, WaitCause.MOUNT, begun_s)
    causes = figures(waits.figures(), "causes_s")
    assert (causes["decompression"], causes["mount"]) == (3.0, 1.0)


def test_waits_of_a_process_are_added_to_its_rank_once_that_is_known() -> None:
    """If a request of the process waits meanwhile, they are added after its answer."""
    clock, known = ManualClock(1000.0), list[ReaderGroup]()
    alone, rank = ReaderGroup(None, 7, "python"), ReaderGroup(3, 5, "python")
    waits = Waits(lambda _: known[0] if known else alone, now=clock)
    clock.now_s += 1
    waits.answered(70, WaitCause.METADATA, clock() - 1)
    wait = waits.begin(70, WaitCause.MOUNT, clock())
    known.append(rank)
    waits.regroup(alone, rank)
    waits.answered(70, WaitCause.METADATA, clock())
    clock.now_s += 2
    waits.end(wait)
    found = waits.figures()
    [reader] = readers_in(found)
    assert (reader["rank"], reader["pid"], reader["requests"]) == (3, 5, 3)
    assert reader["waited_s"] == found["waited_s"] == 3.0


def test_many_processes_never_push_out_a_rank() -> None:
    clock = ManualClock(1000.0)
    waits = Waits(lambda thread: ReaderGroup(0 if thread == 1 else None, thread, "x"), now=clock)
    for thread in range(1, 10 * READERS_MAX):
        clock.now_s += 1
        waits.answered(thread, WaitCause.METADATA, clock() - 0.5)
    found = waits.figures()
    assert len(readers_in(found)) == READERS_MAX
    assert readers_in(found)[0]["rank"] == 0
    assert found["waited_s"] == pytest.approx(0.5 * (10 * READERS_MAX - 1))


CHILDREN = """if True:
    import os, subprocess, sys
    child = os.fork()
    if child == 0:
        sys.stdin.read()
        os._exit(0)
    print(child, flush=True)
    os.waitpid(child, 0)
"""


@pytest.mark.parametrize("rank", [None, 3])
def test_workers_belong_to_their_script_and_its_rank(rank: int | None) -> None:
    environment = {key: value for key, value in os.environ.items() if "RANK" not in key}
    if rank is not None:
        environment["RANK"] = str(rank)
    with subprocess.Popen(
        [sys.executable, "-c", CHILDREN],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True,
    ) as script:  # fmt: skip
        assert script.stdout is not None
        assert script.stdin is not None
        worker = int(script.stdout.readline())
        found: list[tuple[ReaderGroup, ReaderGroup]] = []
        processes = ReaderProcesses(mount_pid=0)
        processes.on_found = lambda *groups: found.append(groups)
        assert processes.group_of(worker) == ReaderGroup(None, worker, Path(sys.executable).name)
        expected = reader_group(script.pid)
        assert (expected.rank, expected.pid) == (rank, script.pid)
        wait_until(lambda: found)
        assert found[0][1] == expected
        wait_until(lambda: processes.group_of(worker) == expected)
        assert ReaderProcesses(mount_pid=script.pid).group_of(worker) is None
        script.stdin.close()


def test_an_invisible_process_has_no_group() -> None:
    assert reader_group((1 << 22) + 1) == UNSEEN
    assert ReaderProcesses(0).group_of((1 << 22) + 1) == UNSEEN
    kernel_thread = 2
    if Path(f"/proc/{kernel_thread}/comm").exists():
        assert ReaderProcesses(0).group_of(kernel_thread).pid in (0, 2)  # type: ignore[union-attr]  # not ours
