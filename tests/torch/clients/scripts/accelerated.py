"""Trains with Hugging Face's accelerate, under `accelerate launch`."""

import argparse
import json
import os

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from .seen import Seen

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--loaders", type=json.loads, default={}, help="DataLoaderConfiguration")
parser.add_argument("--skip", type=int, default=0, help="batches of the last epoch to skip")


def main() -> None:
    args = parser.parse_args()
    set_seed(3)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**args.loaders))
    augment = transforms.Compose(
        [transforms.RandomResizedCrop(64), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    )
    fixed = transforms.Compose([transforms.Resize((64, 64)), transforms.ToTensor()])
    train = datasets.ImageFolder(os.path.join(args.data, "train"), augment)
    val = datasets.ImageFolder(os.path.join(args.data, "val"), fixed)
    model = nn.Sequential(nn.Conv2d(3, 4, 7, stride=4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model, optimizer, train_loader, val_loader = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        DataLoader(train, 16, shuffle=True, num_workers=args.workers),
        DataLoader(val, 16, num_workers=args.workers),
    )
    trained, validated = Seen("train"), Seen("val")
    for epoch in range(args.epochs):
        model.train()
        loader = train_loader
        if args.skip and epoch == args.epochs - 1:
            train_loader.set_epoch(epoch)
            loader = accelerator.skip_first_batches(train_loader, args.skip)
        for images, target in loader:
            trained.add(images, target)
            accelerator.backward(nn.functional.cross_entropy(model(images), target % 4))
            optimizer.step()
            optimizer.zero_grad()
        trained.epoch_is_over()
        accelerator.wait_for_everyone()
        model.eval()
        with torch.no_grad():
            for images, target in val_loader:
                _, labels = accelerator.gather_for_metrics((model(images), target))
                assert len(labels)
                validated.add(images, target)
        validated.epoch_is_over()
        accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
