"""The program in the pod that fills a Dataset (its preparation): runs `dlcmd`, and reports the
outcome.

    python -m diesel_kubernetes.operator.prepare --result FILE --listen HOST:PORT \\
        --describe NAME -- put s3://bucket/images NAME

It runs `dlcmd --json` with the arguments after `--`, then (if `--keep` is given) a purge, then
`dlcmd stat`. It writes a report, one JSON object: `{"dataset": {...}}` with the result of `stat`,
`{"done": true}` without `--describe`, or `dlcmd`'s error. The exit code is that of `dlcmd`. While
it runs, `GET /progress` answers with the last progress of `put`.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import click

from .decoding import Json

RESULT_BYTES_MAX = 4096
"""Kubernetes has this limit for a termination message."""

_MESSAGE_CHARS_MAX = 800
_LINES_KEPT = 20
_REPORTED = ("dataset", "entries", "files", "bytes", "chunks", "version", "identity")


class Failed(Exception):
    """`code` is the exit code of `dlcmd`, or minus the number of the signal that ended it. `report`
    is empty if it was interrupted."""

    def __init__(self, code: int, report: Json) -> None:
        super().__init__(f"exit code {code}")
        self.code = code
        self.report = report


class Runner:
    def __init__(self) -> None:
        self.progress: Json = {}
        self._process: subprocess.Popen[str] | None = None
        self._is_ended = False

    def run(self, arguments: Sequence[str]) -> Json:
        """Returns the last object that `dlcmd --json` prints. Raises Failed."""
        if self._is_ended:
            raise Failed(128 + signal.SIGTERM, {})
        with subprocess.Popen(
            [sys.executable, "-m", "dlcmd", "--json", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as process:
            self._process = process
            if self._is_ended:  # by a signal that came while the process was being started
                process.terminate()
            assert process.stdout is not None
            assert process.stderr is not None
            errors: list[str] = []
            reader = threading.Thread(target=_keep_last, args=(process.stderr, errors))
            reader.start()
            last: Json = {}
            for line in process.stdout:
                found = _parsed(line)
                if found.get("event") == "progress":
                    self.progress = progress_of(found)
                elif found:
                    last = found
            reader.join()
        self._process = None
        if process.returncode:
            raise Failed(process.returncode, error_report(errors, process.returncode))
        return last

    def end(self) -> None:
        """Terminates the running process, and starts no other. A signal handler may call this."""
        self._is_ended = True
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.terminate()


def _keep_last(stream: "object", lines: list[str]) -> None:
    for line in stream:  # type: ignore[attr-defined]  # a log is an iterator
        click.echo(line, err=True, nl=False)
        lines.append(line)
        del lines[:-_LINES_KEPT]


def _parsed(line: str) -> Json:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def progress_of(found: Json) -> Json:
    entries, size, total = (
        value if isinstance(value, int) else 0
        for value in (found.get("entries"), found.get("bytes"), found.get("entries_total"))
    )
    percent = {"percent": min(100, 100 * entries // total)} if total else {}
    return {"entries": entries, "bytes": size, **percent}


def error_report(lines: Sequence[str], code: int) -> Json:
    """Returns {} if the run was interrupted. `lines` are the last ones of stderr."""
    for line in reversed(lines):
        found = _parsed(line)
        if "error" in found and "message" in found:
            message = str(found["message"])[:_MESSAGE_CHARS_MAX]
            advice = str(found.get("advice", ""))[:_MESSAGE_CHARS_MAX]
            return {
                "error": found["error"],
                "message": message,
                "advice": advice,
                "exit_code": code,
            }
    if code < 0 or code in (130, 143):
        return {}  # the run was interrupted: the operator makes another attempt
    shown = "".join(lines)[-_MESSAGE_CHARS_MAX:].strip()
    message = f"dlcmd ended with exit code {code}: {shown}"
    return {"error": "DieselError", "message": message, "advice": "", "exit_code": code}


def prepare(runner: Runner, arguments: Sequence[str], describe: str, keep: int | None) -> Json:
    """Runs `dlcmd` with `arguments` (if any), then a purge (if `keep` is a number), then `stat` of
    `describe` (if not empty). `keep` requires `describe`. Returns the report. Raises Failed."""
    if arguments:
        runner.run(arguments)
    if keep is not None:
        runner.run(["purge", f"--keep={keep}", describe])
    if not describe:
        return {"done": True}
    described = runner.run(["stat", describe])
    return {"dataset": {name: described.get(name) for name in _REPORTED}}


def _serve(runner: Runner, listen: str) -> None:

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = json.dumps(runner.progress).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    host, _, port = listen.rpartition(":")
    try:
        server = ThreadingHTTPServer((host.strip("[]"), int(port)), Handler)
    except (OSError, ValueError) as error:
        click.echo(f"cannot answer requests for progress at {listen}: {error}", err=True)
        return
    threading.Thread(target=server.serve_forever, daemon=True).start()


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--result", type=click.Path(path_type=Path), required=True, metavar="FILE",
              help="Where the report is written.")  # fmt: skip
@click.option(
    "--listen", default="", metavar="HOST:PORT", help="Where requests for progress are answered."
)
@click.option("--describe", default="", metavar="DATASET[@VERSION]",
              help="The dataset that the report describes.")  # fmt: skip
@click.option("--keep", type=click.IntRange(0), help="How many versions a purge keeps.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def program(
    result: Path, listen: str, describe: str, keep: int | None, arguments: tuple[str, ...]
) -> None:
    """Run dlcmd with ARGUMENTS, and report its outcome. Runs in pods of the operator.

    \b
    Example:
      python -m diesel_kubernetes.operator.prepare --result r.json --describe pets \\
          -- put s3://bucket/images pets
    """
    runner = Runner()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: runner.end())
    if listen:
        _serve(runner, listen)
    code = 0
    try:
        report = prepare(runner, arguments, describe, keep)
    except Failed as failed:
        report, code = failed.report, failed.code
    if report:  # if it is too long, it is cut, and the operator shows its end as text
        result.write_bytes(json.dumps(report, ensure_ascii=False).encode()[:RESULT_BYTES_MAX])
    sys.stdout.flush()
    os._exit(128 - code if code < 0 else code)


if __name__ == "__main__":
    program()
