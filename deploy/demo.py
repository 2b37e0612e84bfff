"""`make demo`: packs a folder of images, mounts the dataset, and trains on the mount; no server.

The training (`demo_training.py`) knows nothing of DIESEL-FS; it runs under `dlcmd run`. The demo
fails if the held-out accuracy stays under 0.8. It leaves one page (`REPORT`), and never a mount, a
process or another file.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from deploy.demo_report import Demo, Epoch, demo_page
from deploy.images import SHAPES, write_images

DLCMD = Path(sys.executable).parent / "dlcmd"
DATASET = "shapes"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "build/demo/report.html"


class DlcmdFailed(Exception):
    def __init__(self, arguments: list[str], exit_code: int) -> None:
        super().__init__(f"dlcmd {' '.join(arguments)}: exit code {exit_code}")


class Dlcmd:
    def __init__(self, folder: Path) -> None:
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("DIESEL_")}
        for kind in ("CACHE", "CONFIG", "DATA", "STATE"):
            self.environment[f"XDG_{kind}_HOME"] = str(folder / kind.lower())
        self.environment["DIESEL_URL"] = f"file://{folder}/store"
        self.typed: list[str] = []

    def __call__(self, *arguments: str) -> None:
        command = list(arguments)
        self.typed.append(shlex.join(["dlcmd", *command]))
        print(f"$ {self.typed[-1]}", flush=True)
        with subprocess.Popen([DLCMD, *command], env=self.environment, cwd=ROOT) as process:
            try:
                exit_code = process.wait()
            except BaseException:  # `dlcmd run` passes the signal on to the training
                process.terminate()
                raise
        if exit_code != 0:
            raise DlcmdFailed(command, exit_code)


def is_mounted(folder: Path) -> bool:
    """Also true for a mount of a dead daemon (`os.path.ismount` fails then)."""
    return f" {folder} " in Path("/proc/self/mounts").read_text(encoding="utf-8")


@contextmanager
def mounted(dlcmd: Dlcmd, folder: Path) -> Iterator[Path]:
    folder.mkdir()
    try:
        dlcmd("mount", DATASET, str(folder))
        yield folder
    finally:
        if is_mounted(folder):
            try:
                dlcmd("umount", str(folder))
            except DlcmdFailed:  # a process has a file open: the mount ends when it closes it
                dlcmd("umount", "--lazy", str(folder))


def _listen_to_interrupts() -> None:
    """Runs in a child, since shells let background jobs ignore ^C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def dashboard(dlcmd: Dlcmd) -> Iterator[str]:
    """Yields the address of the page; "" if the dashboard could not start (stderr has the
    reason)."""
    command = [str(DLCMD), "dashboard", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        command, env=dlcmd.environment, cwd=ROOT, stdout=subprocess.PIPE, text=True,
        preexec_fn=_listen_to_interrupts,  # noqa: PLW1509  # this program has no threads
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip().rpartition(" ")[2]
        finally:
            process.send_signal(signal.SIGINT)


def screenshot(address: str, folder: Path) -> bytes:
    """Returns a PNG; empty if this machine has no browser, or if it fails."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None or not address:
        return b""
    place = folder / "page.png"
    command = [browser, "--headless", "--no-sandbox", "--hide-scrollbars", "--timeout=5000"]
    command += [f"--user-data-dir={folder / 'browser'}", "--window-size=1200,1100"]
    command += [f"--screenshot={place}", address]
    with suppress(subprocess.SubprocessError):
        subprocess.run(command, capture_output=True, timeout=60, check=True)
    return place.read_bytes() if place.exists() else b""


def demonstrate(folder: Path) -> Demo:
    """Raises DlcmdFailed, also if training fails."""
    dlcmd = Dlcmd(folder)
    images = folder / "images"
    file_count = write_images(images)
    size_bytes = sum(each.stat().st_size for each in images.rglob("*") if each.is_file())
    print(f"{file_count:,} PNG and JPEG files of {len(SHAPES)} classes in {images}", flush=True)

    start_s = time.perf_counter()
    dlcmd("put", str(images), DATASET)
    rate = file_count / (time.perf_counter() - start_s)
    print(f"put: {rate:,.0f} files/s, start-up and sync included", flush=True)
    shutil.rmtree(images)  # from now on the files are in the repository only

    with mounted(dlcmd, folder / "mount") as mount:
        waiting, figures = folder / "waiting.html", folder / "figures.json"
        training = [sys.executable, "-m", "deploy.demo_training", str(mount), str(figures)]
        with dashboard(dlcmd) as address:
            dlcmd("run", "--report", str(waiting), "--", *training)
            picture = screenshot(address, folder)
    return Demo(
        commands=dlcmd.typed,
        files=file_count,
        size_bytes=size_bytes,
        put_files_per_s=rate,
        epochs=[Epoch(**each) for each in json.loads(figures.read_text(encoding="utf-8"))],
        waiting_page=waiting.read_text(encoding="utf-8"),
        screenshot=picture,
    )


def _terminate(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):  # an exception, so that `with` cleans up
        signal.signal(number, _terminate)
    try:
        with TemporaryDirectory(prefix="diesel-demo-") as folder:
            page = demo_page(demonstrate(Path(folder)))
        REPORT.parent.mkdir(parents=True, exist_ok=True)
        REPORT.write_text(page, encoding="utf-8")
    except DlcmdFailed as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted; cleaned up", file=sys.stderr)
        return 128 + signal.SIGINT
    print(f"demo: unmounted and cleaned up; the report is {REPORT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
