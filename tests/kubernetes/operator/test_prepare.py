"""The program in the pod of a preparation: its report, its exit code, its progress."""

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from diesel_kubernetes.operator.datasets import JobReport, parse_report
from diesel_kubernetes.operator.prepare import error_report, progress_of
from tests.cli.conftest import program_environment
from tests.kubernetes.fields import Json
from tests.rows import each_row
from tests.storage.objects.swift_server import free_ports
from tests.trees import write
from tests.waiting import wait_until


def start(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    program = [sys.executable, "-m", "diesel_kubernetes.operator.prepare"]
    return subprocess.Popen(
        [*program, f"--result={folder / 'result'}", *arguments],
        env={**program_environment(), "DIESEL_URL": f"file://{folder}/store"},
        stderr=subprocess.PIPE,
        text=True,
    )


def put(folder: Path, source: str, *options: str) -> tuple[int, str, JobReport]:
    """Prepare by putting a folder. Returns the exit code, its output, and its report."""
    words = ("--", "put", str(folder / source), "pets")
    process = start(folder, "--describe=pets", *options, *words)
    _, errors = process.communicate()
    return process.returncode, errors, parse_report((folder / "result").read_text())


def test_a_put_is_described_and_old_versions_are_kept(tmp_path: Path) -> None:
    write(tmp_path / "files", {"a.jpg": b"content"})
    code, errors, report = put(tmp_path, "files", "--keep=1")
    assert code == 0, errors
    assert report.dataset
    assert (report.dataset.files, report.dataset.bytes) == (1, 7)
    assert report.dataset.version


def test_an_error_is_reported_with_its_class_and_exit_code(tmp_path: Path) -> None:
    code, errors, report = put(tmp_path, "none")
    assert (code, report.error) == (10, "NotFoundError")
    assert "there is no file or folder" in errors  # the pod's log has it, too


def test_progress_is_reported_and_sigterm_ends_it_without_a_report(tmp_path: Path) -> None:
    """An open pipe without a writer keeps `put --tar` waiting."""
    (port,) = free_ports(1)
    fifo = tmp_path / "input.tar"
    subprocess.run(["mkfifo", fifo], check=True)
    process = start(tmp_path, f"--listen=127.0.0.1:{port}", "--", "put", "--tar", str(fifo), "pets")

    def is_shown() -> object:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/progress", timeout=5) as answer:
                return json.load(answer) == {}
        except OSError:
            return False

    wait_until(is_shown)
    wait_until(lambda: Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 143
    assert not (tmp_path / "result").exists()


def test_progress_has_percents_only_if_the_total_is_known() -> None:
    found: Json = {"event": "progress", "entries": 5, "entries_total": None, "bytes": 9}
    assert progress_of(found) == {"entries": 5, "bytes": 9}
    assert progress_of({**found, "entries_total": 10})["percent"] == 50
    assert progress_of({**found, "entries_total": 4})["percent"] == 100


@each_row(("code", "is_reported"), [(1, True), (-9, False), (143, False)])
def test_an_end_without_an_error_is_reported_but_no_signal(code: int, is_reported: bool) -> None:
    assert bool(error_report(["Traceback\n"], code)) == is_reported
