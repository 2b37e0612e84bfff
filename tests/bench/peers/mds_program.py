"""Packs a folder with MDSWriter and prints the seconds; runs in the peers' environment.

    python mds_program.py SOURCE OUT

The writer's defaults: shards of 64 MiB, no compression, no hashes. The shards are synced at the
end, as our chunks are.
"""

import os
import sys
import time

# isort: off
import deploy.torchvision_operators  # noqa: F401 (streaming imports torchvision, which may not import)
from streaming import MDSWriter

# isort: on


def main(source: str, out: str) -> None:
    start_s = time.perf_counter()
    with MDSWriter(out=out, columns={"path": "str", "data": "bytes"}) as writer:
        for folder, folders, names in os.walk(source):
            folders.sort()
            for name in sorted(names):
                path = os.path.join(folder, name)
                with open(path, "rb") as file:
                    writer.write({"path": os.path.relpath(path, source), "data": file.read()})
    for name in os.listdir(out):
        descriptor = os.open(os.path.join(out, name), os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    print(time.perf_counter() - start_s)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
