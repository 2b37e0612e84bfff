"""The program that tries a mount: `python -m dlcmd.doctor.trial FOLDER`.

It makes a dataset of one file in FOLDER, mounts it there, reads the file and unmounts. It prints
JSON: the session, why there is no better one, and the seconds; or the error. It is a program of its
own, since `XDG_...` variables put its folders into FOLDER, too. The starter removes FOLDER, and any
mount that is left.
"""

import json
import sys
import time
from pathlib import Path

import diesel_fs
from diesel_fs.errors import DieselError
from diesel_fs.mounts import MountRequest, mount, stats, umount
from diesel_fs.repository.local import LocalRepository

MOUNTPOINT = "mnt"

START_S = 15.0
"""All steps take half a second on an idle machine."""

LIMIT_S = 20.0

_DATASET, _FILE, _CONTENT = "trial", "file", b"read by dlcmd doctor\n"


def try_mount(folder: Path) -> dict[str, object]:
    url, at = (folder / "store").as_uri(), folder / MOUNTPOINT
    LocalRepository.open(url, create=True).close()
    with diesel_fs.connect(_DATASET, url, create=True) as dataset:
        dataset.put(_CONTENT, _FILE)
    begun_s = time.monotonic()
    request = MountRequest(
        url, _DATASET, str(at), memory_bytes=64 << 20, log_file=str(folder / "log")
    )
    mount(request, deadline_s=START_S)
    content = (at / _FILE).read_bytes()
    seconds = time.monotonic() - begun_s
    found = stats(at)
    umount(at)
    if content != _CONTENT:
        raise DieselError("the mount showed other bytes than were put into it")
    notes = found.get("session_notes", [])
    return {"session": found["session"], "notes": notes, "seconds": seconds}


def main() -> None:
    try:
        answer = try_mount(Path(sys.argv[1]))
    except DieselError as error:
        text = "; ".join([error.message, *error.details.splitlines()[-1:]])
        answer = {"error": text, "advice": error.advice}
    except OSError as error:
        answer = {"error": f"{error.filename or ''}: {error.strerror}".lstrip(": "), "advice": ""}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
