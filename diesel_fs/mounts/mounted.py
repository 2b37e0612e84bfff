"""`diesel_fs.mount`: mounts from Python, which last as long as a `with` statement.

It is not part of `launcher.py` because it imports `Dataset`, and so numpy.
"""

import inspect
import os
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

from ..arguments import flag, keyword_errors, local_path, text, whole_number, words_of
from ..client.dataset import Dataset
from ..names import parse_versioned_name
from ..peers.members.options import TaskKwargs, TaskOptions
from ..settings import load_settings
from . import launcher
from .options import MountRequest


class Mounted:
    """A mount that this process has made. The end of a `with` unmounts it; after an error, it does
    so even if files of the mount are still open."""

    def __init__(self, path: Path, metrics: str = "") -> None:
        self.path = path
        self.metrics = metrics  # the address for Prometheus, or ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        launcher.umount(self.path, lazy=kind is not None)

    def __fspath__(self) -> str:
        return os.fspath(self.path)


@keyword_errors()
def mount(
    dataset: Dataset | str,
    folder: str | os.PathLike[str],
    *,
    url: str | None = None,
    memory_bytes: int | None = None,
    allow_other: bool = False,
    metrics: str | None = None,
    **task: Unpack[TaskKwargs],
) -> Mounted:
    """Mounts an open dataset, or one given by name and `url`. Files can be read on return.

    The folder must be empty or missing; a missing one is created, and removed when the mount ends.

    A name like `"pets@1790000000000000"` mounts that kept version; so does a dataset that was
    opened at a kept version. Files that an open dataset has not flushed are not shown. `metrics`,
    as `"127.0.0.1:9401"`, is the address at which Prometheus gets the mount's metrics; port 0 is
    any free one. `task` has the options of a task's shared cache, as for `connect`; the default is
    those of the open dataset. Raises DieselError with the reason.
    """
    if isinstance(dataset, Dataset):
        name, version = dataset.name, dataset.version if dataset.is_kept else 0
        address, credentials = dataset.url, dataset.credentials
    else:
        name, version = parse_versioned_name(dataset)
        settings = load_settings({"url": None if url is None else text("url", url)})
        address, credentials = settings.repository_url, settings.credentials
    path = Path(os.path.realpath(local_path("folder", folder)))
    task_options = TaskOptions.from_kwargs(
        task, str(path), words=words_of(inspect.signature(mount))
    )
    if isinstance(dataset, Dataset) and not any(value is not None for value in task.values()):
        task_options = dataset.task_options
    request = MountRequest(
        address,
        name,
        str(path),
        version=version,
        memory_bytes=0 if memory_bytes is None else whole_number("memory_bytes", memory_bytes),
        policy=task_options.policy,
        allow_other=flag("allow_other", allow_other),
        task_options=task_options,
        metrics="" if metrics is None else text("metrics", metrics),
    )
    launcher.mount(request.with_credentials(credentials))
    return Mounted(path, str(launcher.stats(path)["metrics"]) if metrics else "")
