"""The training of `make demo`: a small CNN on the images of a folder, as in any training script.

`python -m deploy.demo_training FOLDER [FIGURES]` exits with 1 if the accuracy on FOLDER/val stays
under 0.8. It writes the figures of each epoch to a JSON file.
"""

import json
import sys
import time
from pathlib import Path

# isort: off
import deploy.torchvision_operators  # noqa: F401 (torchvision may not import without it)
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

# isort: on
from deploy.images import SHAPES

ACCURACY_MIN = 0.8
ACCURACY_ENOUGH = 0.9  # training ends at this, or after EPOCHS_MAX
EPOCHS_MIN, EPOCHS_MAX = 2, 8
BATCH_FILES = 32
WORKERS = 2
TORCH_THREADS = 1  # with two, on two busy cores, an epoch takes up to four times as long


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for into, out in ((3, 16), (16, 32), (32, 64)):
        convolution = nn.Conv2d(into, out, kernel_size=3, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(64 * 9, len(SHAPES))]
    return nn.Sequential(*layers)


def loader(folder: Path, *, shuffle: bool) -> DataLoader[tuple[torch.Tensor, int]]:
    images = ImageFolder(str(folder), transforms.ToTensor())
    return DataLoader(images, batch_size=BATCH_FILES, shuffle=shuffle, num_workers=WORKERS)


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: DataLoader[tuple[torch.Tensor, int]],
) -> float:
    """Returns the mean loss."""
    model.train()
    losses = []
    for images, labels in batches:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return float(sum(losses) / len(losses))


def held_out_accuracy(model: nn.Module, batches: DataLoader[tuple[torch.Tensor, int]]) -> float:
    model.eval()
    right = total = 0
    with torch.no_grad():
        for images, labels in batches:
            right += int((model(images).argmax(dim=1) == labels).sum())
            total += len(labels)
    return right / total


def train(folder: Path) -> list[dict[str, float]]:
    """The accuracy is that on `folder/val`."""
    torch.manual_seed(1)
    torch.set_num_threads(TORCH_THREADS)
    batches, held_out = (
        loader(folder / "train", shuffle=True),
        loader(folder / "val", shuffle=False),
    )
    file_count = len(batches.dataset) + len(held_out.dataset)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    epochs = []
    for epoch in range(1, EPOCHS_MAX + 1):
        start_s = time.perf_counter()
        loss = train_epoch(model, optimizer, batches)
        accuracy = held_out_accuracy(model, held_out)
        rate = file_count / (time.perf_counter() - start_s)
        print(
            f"epoch {epoch}: {rate:,.0f} files/s with training, "
            f"loss {loss:.3f}, held-out accuracy {accuracy:.3f}",
            flush=True,
        )
        epochs.append({"files_per_s": rate, "loss": loss, "accuracy": accuracy})
        if epoch >= EPOCHS_MIN and accuracy >= ACCURACY_ENOUGH:
            break
    return epochs


def main() -> int:
    folder = Path(sys.argv[1])
    print(f"training a small CNN with ImageFolder({str(folder / 'train')!r})", flush=True)
    epochs = train(folder)
    for place in sys.argv[2:]:
        Path(place).write_text(json.dumps(epochs), encoding="utf-8")
    accuracy = epochs[-1]["accuracy"]
    if accuracy < ACCURACY_MIN:
        print(f"held-out accuracy {accuracy:.3f} is under {ACCURACY_MIN}", file=sys.stderr)
        return 1
    print(f"held-out accuracy {accuracy:.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
