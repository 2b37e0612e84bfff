"""`DieselDataset`: the samples of a dataset for PyTorch, without a mount.

It stays at the version at which it was opened. Several threads may read it, and a forked child may
go on reading. A process that unpickles it opens the same version anew.
"""

import inspect
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Never, Self, Unpack

import numpy as np
from torch.utils.data import Dataset as TorchDataset

from ..arguments import check_words, text, words_of
from ..client.dataset import connect
from ..errors import NoSuchPath, UsageError
from ..format.entries import join, split, whole_object
from ..format.manifest import MANIFEST_NAME, parse_manifest
from ..format.snapshot.reader import Indices, Snapshot
from ..names import cut
from ..peers.members.options import TaskKwargs
from .folder import (
    IMG_EXTENSIONS,
    FolderSamples,
    LazyRows,
    ManifestSamples,
    find_samples,
    named_samples,
)

if TYPE_CHECKING:
    from PIL.Image import Image

Content = bytes | memoryview
"""The content of a file. May be a memoryview if a whole batch is read at once."""


class ConnectKwargs(TaskKwargs, total=False):
    url: str | None
    user: str | None
    key: str | None
    memory_bytes: int | None
    task_memory_bytes: int | None


def load_image(content: Content) -> "Image":
    """Decode an image to RGB. Raises PIL's errors."""
    from PIL import Image  # noqa: PLC0415  (optional)

    with Image.open(io.BytesIO(content)) as image:
        return image.convert("RGB")


class DieselDataset(TorchDataset[tuple[object, object]]):  # type: ignore[misc]  # mypy skips torch
    """The images below a folder, with its subfolders as classes; or the files and targets of a
    manifest.

    Samples, classes and arguments are those of torchvision's `ImageFolder`, with two exceptions:
    `loader` is called with a file's content instead of its path (`loader=bytes` returns the content
    itself), and `extensions` chooses files other than images.
    """

    def __init__(
        self,
        root: str,
        transform: Callable[[Never], object] | None = None,
        target_transform: Callable[[Never], object] | None = None,
        loader: Callable[[Content], object] = load_image,
        is_valid_file: Callable[[str], bool] | None = None,
        allow_empty: bool = False,
        *,
        extensions: str | tuple[str, ...] | None = None,
        manifest: bool | str = False,
        target_loader: Callable[[Never], object] | None = None,
        **options: Unpack[ConnectKwargs],
    ) -> None:
        """Open `root`, which is `"DATASET"`, `"DATASET/FOLDER"` or `"DATASET@VERSION/FOLDER"`.

        `is_valid_file` is called with a file's path in the dataset. `extensions` are lower case;
        None means those of images, unless `is_valid_file` is given. `options` are those of
        `diesel_fs.connect`; with several workers, `task=NAME` lets all processes of a node share
        one cache of chunks.

        With `manifest=True` the samples are those of the manifest in `root`; if `manifest` is text,
        it is the path of another manifest below `root`. `classes` are the manifest's different
        targets. A sample's target is an index of `classes`, or, if the targets are files, the
        content of the target's file as bytes. `target_loader` makes another target from the
        target's text or content.

        Raises NoSuchPath (a FileNotFoundError) if there are no classes, if a class has no files
        unless `allow_empty`, or if a file of the manifest is missing; UsageError for arguments that
        do not fit together; and as `connect`.
        """
        own = words_of(inspect.signature(type(self)))
        check_words(options, [*own, *sorted(ConnectKwargs.__optional_keys__)])
        if text("root", root).startswith("/"):
            raise UsageError(
                f"bad root {cut(root)!r}: it has a slash at its start",
                advice="write DATASET or DATASET/FOLDER",
            )
        name, _, folder = root.partition("/")
        if target_loader is not None and not manifest:
            raise UsageError("target_loader needs a manifest")
        if manifest and (extensions is not None or is_valid_file is not None):
            raise UsageError("a manifest names the files, so nothing else can choose them")
        if extensions is None and is_valid_file is None and not manifest:
            extensions = IMG_EXTENSIONS
        if loader is load_image:
            _check_pil()
        self.root = root
        self.loader = loader
        self.extensions = extensions
        self.transform = transform
        self.target_transform = target_transform
        self.target_loader = target_loader
        # The ID of the process that called `announce`, and its arguments
        self._order: tuple[int, Indices, Indices] | None = None
        self._follower = 0  # the ID of the process that loads in an announced order; 0: none
        self._dataset = connect(name, **options)
        try:
            top = os.fsencode(folder.removesuffix("/"))
            self._samples: FolderSamples | ManifestSamples
            if manifest:
                self._samples = self._read_manifest(top, manifest)
            else:
                self._samples = find_samples(
                    self.snapshot,
                    top,
                    extensions=extensions,
                    is_valid_file=is_valid_file,
                    allow_empty=allow_empty,
                )
        except BaseException:
            self._dataset.close()
            raise
        self.classes = self._samples.classes
        self.class_to_idx = {each: at for at, each in enumerate(self.classes)}

    @property
    def samples(self) -> Sequence[tuple[str, int]]:
        """The path of each sample in the dataset, and its target, made on access."""
        return LazyRows(len(self), self._rows)

    imgs = samples

    @property
    def targets(self) -> Sequence[int]:
        """Each sample's class, as its index in `classes`."""
        return LazyRows(len(self), self._samples.targets)

    @property
    def snapshot(self) -> Snapshot:
        return self._dataset.snapshot

    @property
    def version(self) -> int:
        return self._dataset.version

    def entries(self, samples: Sequence[int] | Indices | None = None) -> Indices:
        """The entries of `samples` in the snapshot (None: of all samples)."""
        own = self._samples.entries
        return (own if samples is None else own[np.asarray(samples, np.int64)]).astype(np.int64)

    def mean_bytes(self, samples: Sequence[int] | Indices) -> float:
        """The mean size of these samples' files. `samples` must not be empty."""
        return float(np.mean(self.snapshot.columns.size[self.entries(samples)]))

    def __len__(self) -> int:
        return len(self._samples.entries)

    def __getitem__(self, index: int) -> tuple[object, object]:
        """One sample and its target. Raises IndexError, and as `diesel_fs.Dataset.get`."""
        at = range(len(self))[index]
        self._about_to_read([at])
        return self._made(at, self._dataset.get(int(self._samples.entries[at])))

    def __getitems__(self, indices: list[int]) -> list[tuple[object, object]]:
        """The samples of a batch with their targets, read at once. Raises as `__getitem__`."""
        everything = range(len(self))
        wanted = [everything[index] for index in indices]
        self._about_to_read(wanted)
        read = self._dataset.read_many(self.entries(wanted))
        first = next(read, memoryview(b""))
        views = chain((first,), read) if wanted else iter(())
        contents: Iterator[Content] = views
        if type(first.obj) is bytes:  # usual if files are read one by one
            contents = map(whole_object, views)
        targets: Iterable[object] = self._samples.targets(wanted)
        if isinstance(self._samples, ManifestSamples):
            if self._samples.target_entries is not None:
                contents = iter([*contents])  # all of them, before the targets' files are read
            targets = self._targets(self._samples, wanted)
        samples = map(self.loader, contents)
        if self.transform is not None:
            samples = map(self.transform, samples)  # type: ignore[arg-type]  # the user's choice
        if self.target_transform is not None:
            targets = map(self.target_transform, targets)  # type: ignore[arg-type]  # likewise
        return list(zip(samples, targets, strict=True))

    def announce(self, order: Indices, ends: Indices) -> None:
        """Announce that this process will read these samples in this order, in groups that end at
        the positions `ends`. Each chunk is then loaded once for its group. An empty order withdraws
        the announcement."""
        self._order = (os.getpid(), order, ends) if len(order) else None

    def close(self) -> None:
        """Release the dataset. Reading afterwards raises UsageError."""
        self._dataset.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        place = f"{self._dataset.name}@{self.version}"
        return f"<DieselDataset {self.root} ({place}), samples: {len(self)}>"

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_order": None, "_follower": 0}

    def _read_manifest(self, folder: bytes, name: bool | str) -> ManifestSamples:
        path = join(folder, MANIFEST_NAME if name is True else os.fsencode(str(name)))
        place = f"{self._dataset.name}/{os.fsdecode(path)}"
        try:
            content = self._dataset.get(os.fsdecode(path))
        except NoSuchPath as error:
            if name is not True:
                raise
            raise NoSuchPath(
                f"there is no manifest {place}", advice="store one by dlcmd put --manifest"
            ) from error
        return named_samples(self.snapshot, split(path)[0], parse_manifest(content, place))

    def _targets(self, found: ManifestSamples, samples: Sequence[int]) -> Iterator[object]:
        numbers = found.targets(samples)
        if found.target_entries is not None:
            entries = found.target_entries[numbers].astype(np.int64)
            contents = map(whole_object, self._dataset.read_many(entries))
            loader = bytes if self.target_loader is None else self.target_loader
            return map(loader, list(contents))  # type: ignore[arg-type]  # the user's choice
        if self.target_loader is None:
            return iter(numbers)
        texts = [found.classes[number] for number in numbers]
        return map(self.target_loader, texts)  # type: ignore[arg-type]  # likewise

    def _made(self, at: int, content: Content) -> tuple[object, object]:
        sample = self.loader(content)
        target: object = self._samples.target(at)
        if isinstance(self._samples, ManifestSamples):
            [target] = self._targets(self._samples, [at])
        if self.transform is not None:
            sample = self.transform(sample)  # type: ignore[arg-type]  # the user's choice
        if self.target_transform is not None:
            target = self.target_transform(target)  # type: ignore[arg-type]  # likewise
        return sample, target

    def _about_to_read(self, samples: list[int]) -> None:
        """Raise NoSuchPath if one of the samples is a dangling link. If the samples begin the
        announced order, load chunks in that order from now on. A forked worker reads only some of
        an order's samples, so it loads chunks in no order, and drops the order that its parent
        follows."""
        for at in self._samples.broken.intersection(samples):
            [(path, _)] = self._rows(range(at, at + 1))
            raise NoSuchPath(
                f"{path!r} in {self._dataset.name!r} is a link that leads to no file of the dataset"
            )
        process = os.getpid()
        if self._follower not in (0, process):
            nothing = np.empty(0, np.int64)
            self._dataset.follow(nothing, nothing)
            self._follower = 0
        announced = self._order
        if announced is None or announced[0] != process or announced[1][0] not in samples[:1]:
            return
        self._order, self._follower = None, process
        self._dataset.follow(self.entries(announced[1]), announced[2])

    def _rows(self, wanted: range) -> list[tuple[str, int]]:
        found = self._samples
        paths = self.snapshot.paths(found.entries[np.array(wanted, np.int64)].astype(np.int64))
        linked = found.linked
        return [
            (linked[at] if at in linked else os.fsdecode(path), found.target(at))
            for at, path in zip(wanted, paths, strict=True)
        ]


def _check_pil() -> None:
    try:
        import PIL.Image  # noqa: F401, PLC0415  (optional)
    except ImportError as error:
        raise ImportError(
            "images are decoded by PIL, which is missing: install pillow, or give another `loader`"
            " (`loader=bytes` gives the content of each file)",
            name="PIL",
        ) from error
