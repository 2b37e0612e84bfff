"""Trains with timm's datasets and loaders, as its own training script makes them."""

import argparse
import os

import torch
from timm.data import create_dataset, create_loader
from timm.data.distributed_sampler import RepeatAugSampler
from timm.optim import create_optimizer_v2
from timm.utils import random_seed
from torch import nn

from .seen import Seen

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--no-prefetcher", action="store_true")
parser.add_argument("--use-multi-epochs-loader", action="store_true")
parser.add_argument("--aug-repeats", type=int, default=0)


def main() -> None:
    args = parser.parse_args()
    distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if distributed:
        torch.distributed.init_process_group("gloo")
    random_seed(42, 0)
    device = torch.device("cpu")
    named = {
        "input_size": (3, 64, 64), "batch_size": args.batch_size, "num_workers": args.workers,
        "distributed": distributed, "use_prefetcher": not args.no_prefetcher, "device": device,
        "pin_memory": False, "use_multi_epochs_loader": args.use_multi_epochs_loader,
    }  # fmt: skip
    train = create_loader(
        create_dataset("", root=args.data, split="train", is_training=True),
        is_training=True, re_prob=0.25,
        num_aug_repeats=args.aug_repeats, **named,
    )  # fmt: skip
    val = create_loader(create_dataset("", root=args.data, split="val"), is_training=False, **named)
    model = nn.Sequential(nn.Conv2d(3, 4, 7, stride=4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    optimizer = create_optimizer_v2(model, "sgd", lr=0.1)
    trained, validated = Seen("train"), Seen("val")
    for epoch in range(args.epochs):
        if distributed and hasattr(train.sampler, "set_epoch"):
            train.sampler.set_epoch(epoch)
        assert bool(args.aug_repeats) == isinstance(train.sampler, RepeatAugSampler)
        model.train()
        for images, target in train:
            trained.add(images, target)
            nn.functional.cross_entropy(model(images), target % 4).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.epoch_is_over()
        model.eval()
        with torch.no_grad():
            for images, target in val:
                model(images)
                validated.add(images, target)
        validated.epoch_is_over()
        if distributed:
            torch.distributed.barrier()
    if distributed:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
