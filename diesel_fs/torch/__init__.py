"""Datasets, samplers and loaders for PyTorch, and the announcement of a script's reads to mounts.

`dlcmd run` puts `hook/` into the processes of a training command; `join` does its work from inside
a script. `planner/` turns the hooks' messages into plans for the mounts. `fsspec.py` is the file
system `diesel://`. README.md is the page for users. Torch is imported only when a name of
`_MODULE_OF` is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .join import join

if TYPE_CHECKING:
    from .dataset import DieselDataset as DieselDataset
    from .importance import GradientNorm as GradientNorm
    from .importance import Importance as Importance
    from .importance import ImportanceSampler as ImportanceSampler
    from .importance import Loss as Loss
    from .loader import AutoDataLoader as AutoDataLoader
    from .manifest_folder import ManifestFolder as ManifestFolder
    from .sampler import ChunkShuffleSampler as ChunkShuffleSampler

_MODULE_OF = {
    "AutoDataLoader": "loader",
    "ChunkShuffleSampler": "sampler",
    "DieselDataset": "dataset",
    "GradientNorm": "importance",
    "Importance": "importance",
    "ImportanceSampler": "importance",
    "Loss": "importance",
    "ManifestFolder": "manifest_folder",
}
"""The module of each exported name that needs torch."""

__all__ = ["join", *_MODULE_OF]  # noqa: PLE0604  # all of it is text


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import_module("torch")
    except ImportError as error:
        raise ImportError(
            f"{__name__}.{name} needs PyTorch: install torch", name="torch"
        ) from error
    value: object = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
