"""Trains on an image folder that Hugging Face's `datasets` loads."""

import argparse

import PIL.Image
import torch
from datasets import Image, load_dataset
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms

from .seen import Seen

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--split", action="store_true", help="shuffle and split the training data")
parser.add_argument("--not-decoded", action="store_true", help="open the files in the transform")


def main() -> None:
    args = parser.parse_args()
    torch.manual_seed(1)
    loaded = load_dataset("imagefolder", data_dir=args.data)
    train, val = loaded["train"], loaded["validation"]
    if args.split:
        parts = train.shuffle(seed=3).train_test_split(0.25, seed=5)
        train, val = parts["train"], parts["test"]
    augment = transforms.Compose(
        [transforms.RandomResizedCrop(64), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    )

    def transformed(rows: dict[str, list[PIL.Image.Image]]) -> dict[str, list[object]]:
        images = rows.pop("image")
        if args.not_decoded:
            images = [Image().decode_example(each) for each in images]
        return {**rows, "pixels": [augment(each.convert("RGB")) for each in images]}

    if args.not_decoded:
        train = train.cast_column("image", Image(decode=False))
        val = val.cast_column("image", Image(decode=False))
    train.set_transform(transformed)
    val.set_transform(transformed)
    train_loader = DataLoader(train, batch_size=16, shuffle=True, num_workers=args.workers)
    val_loader = DataLoader(val, batch_size=16, num_workers=args.workers)
    model = nn.Sequential(nn.Conv2d(3, 4, 7, stride=4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    trained, validated = Seen("train"), Seen("val")
    for _ in range(args.epochs):
        for rows in train_loader:
            trained.add(rows["pixels"], rows["label"])
            nn.functional.cross_entropy(model(rows["pixels"]), rows["label"] % 4).backward()
        trained.epoch_is_over()
        for rows in val_loader:
            validated.add(rows["pixels"], rows["label"])
        validated.epoch_is_over()


if __name__ == "__main__":
    main()
