"""Reads files with libraries written in C: a dataset that lists none of its paths."""

import argparse
import os
import time
from collections.abc import Callable

import cv2
import h5py
import torch
from torch.utils.data import DataLoader, Dataset

from .seen import Seen

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("--reader", choices=("cv2", "h5py"), required=True)
parser.add_argument("--epochs", type=int, default=3)


def by_cv2(path: str) -> torch.Tensor:
    return torch.from_numpy(cv2.imread(path)[:64, :64].copy())


def by_h5py(path: str) -> torch.Tensor:
    with h5py.File(path) as file:
        return torch.from_numpy(file["data"][:])


READERS: dict[str, Callable[[str], torch.Tensor]] = {"cv2": by_cv2, "h5py": by_h5py}


class Named(Dataset[tuple[torch.Tensor, int]]):  # type: ignore[misc] # mypy skips torch
    def __init__(self, root: str, read: Callable[[str], torch.Tensor]) -> None:
        self.root, self.read = root, read
        self.names = sorted(
            os.path.relpath(os.path.join(folder, name), root)
            for folder, _, names in os.walk(os.path.join(root, "train"))
            for name in names
        )

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.read(os.path.join(self.root, self.names[index])), index


def main() -> None:
    args = parser.parse_args()
    torch.manual_seed(11)
    dataset = Named(args.data, READERS[args.reader])
    loader, seen = DataLoader(dataset, batch_size=16, shuffle=True, num_workers=2), Seen("train")
    for _ in range(args.epochs):
        for images, target in loader:
            seen.add(images, target)
        seen.epoch_is_over()
        time.sleep(0.5)  # as a validation


if __name__ == "__main__":
    main()
