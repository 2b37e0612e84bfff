"""Tests of the costs of a run of tests, and of the deep tests that a change reaches."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis.statistics import collector, describe_statistics
from hypothesis.strategies import integers

from diesel_fs.system.daemons import DETACH
from tests import affected, costs
from tests.cli.conftest import program_environment

CASE = """
<testcase classname="tests.peers.test_x{name}" name="test_y[1]" time="1.5"><properties>
<property name="costs" value="{costs}"/></properties></testcase>
"""


def junit(folder: Path, *texts: str) -> Path:
    """Costs are JSON with single quotes."""
    cases = "".join(
        CASE.format(name=number, costs=text.replace("'", "&quot;"))
        for number, text in enumerate(texts)
    )
    path = folder / "run.xml"
    path.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    return path


def test_costs_are_summed_by_folder(tmp_path: Path) -> None:
    run = costs.read(junit(tmp_path, "{'cpu_s': 2.5, 'programs': 3}", "{'programs': 1}"))
    assert run[0].name == "tests/peers/test_x0.py::test_y[1]"
    row = costs.by_folder(run)["peers"]
    assert (row["tests"], row["wall_s"], row["cpu_s"], row["programs"]) == (2, 3.0, 2.5, 4)
    lines = costs.table(run).splitlines()
    assert lines[1].split()[:4] == ["peers", "2", "3", "2"]
    assert lines[-2].endswith("tests/peers/test_x0.py::test_y[1]"), "the one that cost most"


def test_a_folder_that_starts_more_than_its_budget_is_named(tmp_path: Path) -> None:
    run = costs.read(junit(tmp_path, "{'programs': 3, 'mounts': 1}"))
    assert costs.beyond(run, {"peers": {"programs": 3, "mounts": 1, "torch": 0}}) == []
    assert costs.beyond(run, {"peers": {"programs": 2, "mounts": 1, "torch": 0}}) == [
        "peers starts 3 programs, the budget is 2"
    ]
    assert len(costs.beyond(run, {})) == 2, "a new folder has no budget"


def test_programs_are_counted_however_they_start() -> None:
    counts = costs.Counts()
    for words in (
        [sys.executable, "-m", "dlcmd", "ls"],
        [sys.executable, "-m", "dlcmd", "mount", "pets", "/mnt"],
        ["setpriv", "--pdeathsig", "KILL", sys.executable, "-c", "import torch"],
        ["redis-server", "--port", "0"],
        [sys.executable, "-I", "-S", "-c", "pass", "/mnt"],
        [
            sys.executable,
            *DETACH,
            sys.executable,
            "-m",
            "diesel_fs.mounts.daemon.supervisor",
            "/mnt",
        ],
    ):
        counts.hear("subprocess.Popen", (words[0], words, None, None))
    assert counts == {
        "programs": 4, "mounts": 2, "torch": 1, "other programs": 1, "servers": 1, "probes": 1,
    }  # fmt: skip


def test_the_examples_of_a_property_are_counted() -> None:
    described: list[str] = []
    tried = []

    @settings(max_examples=7, database=None)
    @given(integers())
    def law(number: int) -> None:
        tried.append(number)

    with collector.with_value(lambda found: described.append(describe_statistics(found))):  # type: ignore[arg-type]  # Hypothesis declares its first value, None
        law()
    assert costs.examples(described[0]) == len(tried) == 7


BURNS = "import time\nwhile time.process_time() < 0.3: pass"
MEASURES = f"""if True:
    import subprocess, sys, time
    from tests.costs import ProcessorTime
    clock = ProcessorTime()
    before_s = clock.seconds()
    with subprocess.Popen([sys.executable, "-c", {BURNS!r}]):
        pass
    after_s = clock.seconds()
    time.sleep(0.05)
    print(after_s - before_s, clock.seconds() - after_s)
    clock.close()
"""


@pytest.mark.real_start
def test_processor_time_is_that_of_all_processes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURES], env=program_environment(), check=True, capture_output=True
    )
    busy_s, idle_s = map(float, done.stdout.split())
    assert busy_s > 0.25
    assert idle_s < 0.05


def test_a_change_reaches_the_packages_that_import_its_modules() -> None:
    folders = affected.folders
    assert folders(["cli/dlcmd/verbs/put.py"]) == {"tests/cli"}
    reached = folders(["diesel_fs/peers/wire.py"])
    assert {"tests/peers", "tests/mounts", "tests/cli"} <= reached
    assert not {"tests/format", "tests/orders", "tests/storage"} & reached
    assert folders(["tests/peers/nodes.py", "README.md"]) == {"tests/peers"}
    assert folders(["tests/waiting.py"]) == {affected.EVERYTHING}
