"""`make demo`: packs a folder of images, mounts the dataset, and trains on the mount; no server.

The training uses torchvision's own `ImageFolder` and torch's own `DataLoader`, and does not know
that it reads from DIESEL-FS. The demo fails if the held-out accuracy stays under 0.8. However it
ends, it leaves no mount, no process and no file behind.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

# isort: off
import deploy.torchvision_operators  # noqa: F401 (torchvision may not import without it)
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

# isort: on
from deploy.images import SHAPES, write_images

DLCMD = Path(sys.executable).parent / "dlcmd"
DATASET = "shapes"
ACCURACY_MIN = 0.8
ACCURACY_ENOUGH = 0.9  # training ends when this is reached, or after EPOCHS_MAX
EPOCHS_MIN, EPOCHS_MAX = 2, 8
BATCH_FILES = 32
WORKERS = 2
TORCH_THREADS = 1  # with two, on two busy cores, an epoch takes up to four times as long


class DlcmdFailed(Exception):
    """A command failed, with this exit code; dlcmd has printed the reason."""

    def __init__(self, arguments: list[str], exit_code: int) -> None:
        super().__init__(f"dlcmd {' '.join(arguments)}: exit code {exit_code}")


class Dlcmd:
    """The command line, with a repository, logs and caches of its own."""

    def __init__(self, folder: Path) -> None:
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("DIESEL_")}
        for kind in ("CACHE", "CONFIG", "DATA", "STATE"):
            self.environment[f"XDG_{kind}_HOME"] = str(folder / kind.lower())
        self.environment["DIESEL_URL"] = f"file://{folder}/store"

    def __call__(self, *arguments: str) -> None:
        command = list(arguments)
        print("$ dlcmd", *command, flush=True)
        exit_code = subprocess.run([DLCMD, *command], env=self.environment, check=False).returncode
        if exit_code != 0:
            raise DlcmdFailed(command, exit_code)


def is_mounted(folder: Path) -> bool:
    """Whether the kernel has a mount here, also one whose daemon died (`os.path.ismount` fails)."""
    return f" {folder} " in Path("/proc/self/mounts").read_text(encoding="utf-8")


@contextmanager
def mounted(dlcmd: Dlcmd, folder: Path) -> Iterator[Path]:
    """Mount the dataset at `folder`, and unmount it at the end in any case."""
    folder.mkdir()
    try:
        dlcmd("mount", DATASET, str(folder))
        yield folder
    finally:
        if is_mounted(folder):
            try:
                dlcmd("umount", str(folder))
            except DlcmdFailed:  # a process has a file open: the mount ends when that is closed
                dlcmd("umount", "--lazy", str(folder))


def network() -> nn.Module:
    """A small network: three convolutions and a linear layer, 25,000 weights."""
    layers: list[nn.Module] = []
    for into, out in ((3, 16), (16, 32), (32, 64)):
        convolution = nn.Conv2d(into, out, kernel_size=3, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(64 * 9, len(SHAPES))]
    return nn.Sequential(*layers)


def loader(folder: Path, *, shuffle: bool) -> DataLoader[tuple[torch.Tensor, int]]:
    """The batches of a folder, loaded as any training script does."""
    images = ImageFolder(str(folder), transforms.ToTensor())
    return DataLoader(images, batch_size=BATCH_FILES, shuffle=shuffle, num_workers=WORKERS)


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: DataLoader[tuple[torch.Tensor, int]],
) -> float:
    """One pass over the training files; returns the mean loss."""
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
    """The share of held-out files whose class the model names."""
    model.eval()
    right = total = 0
    with torch.no_grad():
        for images, labels in batches:
            right += int((model(images).argmax(dim=1) == labels).sum())
            total += len(labels)
    return right / total


def train(folder: Path) -> float:
    """Trains on `folder/train`, prints each epoch, returns the last accuracy on `folder/val`."""
    torch.manual_seed(1)
    torch.set_num_threads(TORCH_THREADS)
    batches, held_out = (
        loader(folder / "train", shuffle=True),
        loader(folder / "val", shuffle=False),
    )
    file_count = len(batches.dataset) + len(held_out.dataset)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    accuracy = 0.0
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
        if epoch >= EPOCHS_MIN and accuracy >= ACCURACY_ENOUGH:
            break
    return accuracy


def demonstrate(folder: Path) -> float:
    """Run the demo inside a temporary folder; return the held-out accuracy."""
    dlcmd = Dlcmd(folder)
    images = folder / "images"
    file_count = write_images(images)
    print(f"{file_count:,} PNG and JPEG files of {len(SHAPES)} classes in {images}", flush=True)

    start_s = time.perf_counter()
    dlcmd("put", str(images), DATASET)
    rate = file_count / (time.perf_counter() - start_s)
    print(f"put: {rate:,.0f} files/s, start-up and sync included", flush=True)
    shutil.rmtree(images)  # from here on the files are in the repository only

    with mounted(dlcmd, folder / "mount") as mount:
        print(f"training a small CNN with ImageFolder({str(mount / 'train')!r})", flush=True)
        return train(mount)


def _terminate(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> int:
    """Run the demo, clean up, and return the exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # an exception, so that `with` cleans up
        signal.signal(number, _terminate)
    try:
        with TemporaryDirectory(prefix="diesel-demo-") as folder:
            accuracy = demonstrate(Path(folder))
    except DlcmdFailed as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted; cleaned up", file=sys.stderr)
        return 128 + signal.SIGINT
    if accuracy < ACCURACY_MIN:
        print(f"demo: held-out accuracy {accuracy:.3f} is under {ACCURACY_MIN}", file=sys.stderr)
        return 1
    print(f"demo: held-out accuracy {accuracy:.3f}; unmounted and cleaned up")
    return 0


if __name__ == "__main__":
    sys.exit(main())
