"""Trains with torchdata's StatefulDataLoader, and resumes in the middle of the second epoch."""

import argparse
import os

import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torchvision import datasets, transforms

from .seen import Seen

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--persistent", action="store_true")
parser.add_argument("--state-first", action="store_true", help="ask for a state before all else")


def main() -> None:
    args = parser.parse_args()
    torch.manual_seed(11)
    augment = transforms.Compose(
        [transforms.RandomResizedCrop(64), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    )
    train = datasets.ImageFolder(os.path.join(args.data, "train"), augment)

    def made() -> StatefulDataLoader:
        return StatefulDataLoader(
            train, batch_size=16, shuffle=True, num_workers=args.workers,
            persistent_workers=args.persistent,
        )  # fmt: skip

    loader, seen = made(), Seen("train")
    if args.state_first:
        loader.state_dict()
    for epoch in range(args.epochs):
        for number, (images, target) in enumerate(loader):
            seen.add(images, target)
            if (epoch, number) == (1, 5):
                break
        if epoch == 1:
            state = loader.state_dict()
            torch.rand(3)
            loader = made()
            loader.load_state_dict(state)
            for images, target in loader:
                seen.add(images, target)
        seen.epoch_is_over()


if __name__ == "__main__":
    main()
