"""A training script with many files, of which it reads none: LIST, in the peers' environment.

LIST holds the NUL-terminated paths of a dataset. The script begins an epoch of a shuffling
`DataLoader` and takes its first batch. It prints the seconds that this took, and the growth of this
process's memory meanwhile, at its peak.
"""

import json
import os
import re
import sys
import time
from pathlib import Path

from torch.utils.data import DataLoader, Dataset

BATCH = 256


class Named(Dataset[int]):  # type: ignore[misc] # mypy skips torch
    """A dataset that knows its files, as torchvision's `DatasetFolder` does."""

    def __init__(self, paths: list[str]) -> None:
        self.samples = [(path, 0) for path in paths]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> int:
        return index


def memory(key: str) -> int:
    """The bytes of a line of the kernel's status of this process."""
    found = re.search(rf"^{key}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def main(listed: str) -> None:
    paths = [os.fsdecode(path) for path in Path(listed).read_bytes().split(b"\0")[:-1]]
    loader = DataLoader(Named(paths), batch_size=BATCH, shuffle=True)
    del paths
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, start_s = memory("VmRSS"), time.perf_counter()
    next(iter(loader))
    seconds = time.perf_counter() - start_s
    print(json.dumps({"seconds": seconds, "bytes": memory("VmHWM") - before}))


if __name__ == "__main__":
    main(sys.argv[1])
