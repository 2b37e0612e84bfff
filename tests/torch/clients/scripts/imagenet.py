"""The shape of PyTorch's ImageNet example: alone, or with DDP under torchrun."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms

from .seen import Seen

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--seed", type=int, default=1)


def main() -> None:
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    model = nn.Sequential(nn.Conv2d(3, 4, 7, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    model = nn.Sequential(model, nn.Flatten(), nn.Linear(4, 10))
    if world > 1:
        model = nn.parallel.DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    train_dataset = datasets.ImageFolder(
        os.path.join(args.data, "train"),
        transforms.Compose(
            [
                transforms.RandomResizedCrop(64),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
            ]
        ),
    )
    val_dataset = datasets.ImageFolder(
        os.path.join(args.data, "val"),
        transforms.Compose(
            [transforms.Resize(72), transforms.CenterCrop(64), transforms.ToTensor()]
        ),
    )
    train_sampler = DistributedSampler(train_dataset) if world > 1 else None
    val_sampler = (
        DistributedSampler(val_dataset, shuffle=False, drop_last=True) if world > 1 else None
    )
    train_loader = DataLoader(
        train_dataset, batch_size=args.batch_size, shuffle=train_sampler is None,
        num_workers=args.workers, sampler=train_sampler,
    )  # fmt: skip
    val_loader = DataLoader(
        val_dataset, batch_size=args.batch_size, num_workers=args.workers, sampler=val_sampler
    )
    trained, validated = Seen("train"), Seen("val")
    for epoch in range(args.epochs):
        if train_sampler is not None:
            train_sampler.set_epoch(epoch)
        model.train()
        for images, target in train_loader:
            trained.add(images, target)
            loss = criterion(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        trained.epoch_is_over()
        model.eval()
        with torch.no_grad():
            validate(model, val_loader, validated)
            if world > 1 and len(val_loader.sampler) * world < len(val_dataset):
                rest = range(len(val_loader.sampler) * world, len(val_dataset))
                validate(
                    model,
                    DataLoader(
                        Subset(val_dataset, rest),
                        batch_size=args.batch_size,
                        num_workers=args.workers,
                    ),
                    validated,
                )
        validated.epoch_is_over()
        if world > 1:
            dist.barrier()
    if world > 1:
        dist.destroy_process_group()


def validate(model: nn.Module, loader: DataLoader[object], seen: Seen) -> None:
    for images, target in loader:
        model(images)
        seen.add(images, target)


if __name__ == "__main__":
    main()
