"""Mounts a tar with ratarmount, through FUSE."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..mounts import is_mounted
from ..samples import PeerMissing
from . import installed

NAME = "ratarmount"
READY_S = 60.0
END_S = 20.0


@contextmanager
def mounted(archive: Path, mountpoint: Path) -> Iterator[Path]:
    """Mount the archive at a mount point, which is made; the index lies beside the archive."""
    mountpoint.mkdir(exist_ok=True)
    index = archive.with_suffix(".index")
    command = [installed("ratarmount"), "-f", "--index-file", str(index)]
    with archive.with_suffix(".log").open("w+") as log:
        process = subprocess.Popen(
            [*command, str(archive), str(mountpoint)], stdout=log, stderr=log
        )
        try:
            _wait(process, mountpoint)
            yield mountpoint
        except PeerMissing as error:
            log.seek(0)
            raise PeerMissing(f"{error}: {log.read().strip()[-300:]}") from None
        finally:
            if is_mounted(mountpoint):
                subprocess.run(["fusermount3", "-u", str(mountpoint)], check=False)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if is_mounted(mountpoint):  # its process died, or a file is open
                subprocess.run(["fusermount3", "-uz", str(mountpoint)], check=False)


def _wait(process: "subprocess.Popen[bytes]", mountpoint: Path) -> None:
    """Wait until it is mounted."""
    give_up_s = time.monotonic() + READY_S
    while not is_mounted(mountpoint):
        if process.poll() is not None or time.monotonic() > give_up_s:
            process.kill()
            raise PeerMissing("it did not mount")
        time.sleep(0.05)
