"""DIESEL-FS: packs datasets of many small files into chunks, and serves them to training jobs.

The names in `__all__` are the public interface. All but the errors are imported at their first use,
so a program that needs few of them starts fast.

The packages, from the bottom up (each imports only those before it): `system` and `format` (the
machine; every byte at rest), `orders` (which file is read next), `net` (the transport), `storage`
(objects and metadata), `cache`, `repository` (the meaning of all operations on datasets) and
`remote` (the same behind a server), `peers` (the cache that the nodes of a training task share),
`ingest` (from files to chunks), `client` (the Python API), `mounts` (FUSE), `forecast` and `torch`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .errors import BusyError as BusyError
from .errors import ConfigError as ConfigError
from .errors import ConflictError as ConflictError
from .errors import CorruptError as CorruptError
from .errors import DeadlineError as DeadlineError
from .errors import DieselError as DieselError
from .errors import ForeignError as ForeignError
from .errors import FormatError as FormatError
from .errors import IsAFolder as IsAFolder
from .errors import MetadataBehind as MetadataBehind
from .errors import MetadataError as MetadataError
from .errors import NewerVersionError as NewerVersionError
from .errors import NoSpaceError as NoSpaceError
from .errors import NoSuchDataset as NoSuchDataset
from .errors import NoSuchFile as NoSuchFile
from .errors import NoSuchPath as NoSuchPath
from .errors import NotAFolder as NotAFolder
from .errors import NotFoundError as NotFoundError
from .errors import ObjectExists as ObjectExists
from .errors import ObjectMissing as ObjectMissing
from .errors import ObjectStoreError as ObjectStoreError
from .errors import ObjectStoreRefused as ObjectStoreRefused
from .errors import PartialError as PartialError
from .errors import PermissionDenied as PermissionDenied
from .errors import TruncatedError as TruncatedError
from .errors import UsageError as UsageError

if TYPE_CHECKING:
    from .client.dataset import Dataset as Dataset
    from .client.dataset import connect as connect
    from .client.dataset import list_datasets as list_datasets
    from .format.entries import Kind as Kind
    from .format.entries import Stat as Stat
    from .mounts import filelist as filelist
    from .mounts import umount as umount
    from .mounts.mounted import mount as mount

__version__ = "0.1.0"

_MODULE_OF = {
    "Dataset": "client.dataset",
    "connect": "client.dataset",
    "list_datasets": "client.dataset",
    "Kind": "format.entries",
    "Stat": "format.entries",
    "filelist": "mounts",
    "umount": "mounts",
    "mount": "mounts.mounted",
}
"""The modules of the names that are imported at their first use."""

__all__ = [  # noqa: PLE0604  # all of it is text
    "__version__",
    *_MODULE_OF,
    *(name for name, value in globals().items() if isinstance(value, type)),  # the errors
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'diesel_fs' has no attribute {name!r}")
    value: object = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
