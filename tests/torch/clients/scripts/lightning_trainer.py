"""Trains with lightning's Trainer, alone or with its own DDP, which replaces the samplers."""

import argparse
import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler
from torchvision import datasets, transforms

from .seen import Seen

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--weighted", action="store_true")


class Model(lightning.LightningModule):  # type: ignore[misc] # mypy skips lightning
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 7, stride=4), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.trained, self.validated, self.predicted = Seen("train"), Seen("val"), Seen("predict")

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        images, target = batch
        self.trained.add(images, target)
        return nn.functional.cross_entropy(self.body(images), target % 4)

    def on_train_epoch_end(self) -> None:
        self.trained.epoch_is_over()
        self.trainer.strategy.barrier()

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        images, target = batch
        self.validated.add(images, target)
        self.log("loss", nn.functional.cross_entropy(self.body(images), target % 4), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.validated.epoch_is_over()
        self.trainer.strategy.barrier()

    def predict_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        self.predicted.add(*batch)
        return self.body(batch[0])

    def on_predict_epoch_end(self) -> None:
        self.predicted.epoch_is_over()
        self.trainer.strategy.barrier()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def main() -> None:
    args = parser.parse_args()
    lightning.seed_everything(7)
    augment = transforms.Compose(
        [transforms.RandomResizedCrop(64), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    )
    fixed = transforms.Compose([transforms.Resize((64, 64)), transforms.ToTensor()])
    train = datasets.ImageFolder(os.path.join(args.data, "train"), augment)
    val = datasets.ImageFolder(os.path.join(args.data, "val"), fixed)
    weights = [1.0 + label for _, label in train.samples]
    sampler = WeightedRandomSampler(weights, len(train)) if args.weighted else None
    trainer = lightning.Trainer(
        max_epochs=args.epochs, accelerator="cpu", devices=args.devices, logger=False,
        strategy="ddp" if args.devices > 1 else "auto", enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Model()
    trainer.fit(
        model,
        DataLoader(train, 16, shuffle=sampler is None, sampler=sampler, num_workers=args.workers),
        DataLoader(val, 16, num_workers=args.workers),
    )
    trainer.predict(model, DataLoader(val, 16, num_workers=args.workers))


if __name__ == "__main__":
    main()
