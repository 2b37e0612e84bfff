"""`ManifestFolder`: the samples of a manifest, read as files of a folder on a mount or elsewhere
(for example made by `dlcmd get`)."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Never

from torch.utils.data import Dataset as TorchDataset

from ..errors import NoSuchPath
from ..format.manifest import MANIFEST_NAME, parse_manifest
from .dataset import load_image


def load_image_file(path: str) -> object:
    """Read and decode an image to RGB. Raises OSError, and PIL's errors."""
    return load_image(Path(path).read_bytes())


class ManifestFolder(TorchDataset[tuple[object, object]]):  # type: ignore[misc]  # mypy skips torch
    """The samples and targets of a manifest, in its order.

    It has `samples` (also `imgs`), `targets`, `classes` and `class_to_idx` as torchvision's
    `ImageFolder`, so its reads can be announced to a mount (`dlcmd run`, `ChunkShuffleSampler`).
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        transform: Callable[[Never], object] | None = None,
        target_transform: Callable[[Never], object] | None = None,
        loader: Callable[[str], object] = load_image_file,
        *,
        manifest: str = os.fsdecode(MANIFEST_NAME),
        target_loader: Callable[[str], object] | None = None,
    ) -> None:
        """Read the manifest at the path `manifest` below `root`. Its paths are relative to its own
        folder.

        `loader` is called with a file's path. `target_loader` is called with a target's text, or
        with its path if the targets are files. Without it, a target is its number in `classes`, or,
        if the targets are files, the file's content as bytes. Missing files are not detected until
        they are read. Raises NoSuchPath (a FileNotFoundError) if there is no manifest, and
        UsageError if it is malformed.
        """
        place = os.path.join(root, manifest)
        try:
            content = Path(place).read_bytes()
        except FileNotFoundError as error:
            advice = "store one by dlcmd put --manifest"
            raise NoSuchPath(f"there is no manifest {place}", advice=advice) from error
        found = parse_manifest(content, place)
        self.root = os.fspath(root)
        self.transform = transform
        self.target_transform = target_transform
        self.loader = loader
        self.target_loader = target_loader
        self.classes = found.classes
        self.class_to_idx = {each: at for at, each in enumerate(self.classes)}
        self.targets: list[int] = found.targets.tolist()
        self._folder = os.path.dirname(place)
        self._targets_are_files = found.names_files
        paths = (os.path.join(self._folder, os.fsdecode(path)) for path in found.paths)
        self.samples = list(zip(paths, self.targets, strict=True))
        self.imgs = self.samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[object, object]:
        path, number = self.samples[index]
        sample, target = self.loader(path), self._target(number)
        if self.transform is not None:
            # The user is responsible for a transform that takes the loader's result
            sample = self.transform(sample)  # type: ignore[arg-type]
        if self.target_transform is not None:
            target = self.target_transform(target)  # type: ignore[arg-type]
        return sample, target

    def _target(self, number: int) -> object:
        if self._targets_are_files:
            path = os.path.join(self._folder, self.classes[number])
            return self.target_loader(path) if self.target_loader else Path(path).read_bytes()
        return self.target_loader(self.classes[number]) if self.target_loader else number

    def __repr__(self) -> str:
        return f"<ManifestFolder {self.root}, samples: {len(self)}>"
