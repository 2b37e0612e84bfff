"""The file system `diesel://` for fsspec, through which pandas, pyarrow, zarr and others read
datasets without a mount. README.md explains URLs and options.

A path here is a URL without its protocol: `DATASET/path`, or `HOST:PORT/DATASET/path`. The server
is a part of the path, not only an option, since many callers keep only URLs, and open them with a
file system of their own.

fsspec makes an instance for each thread. Instances with the same options share their open datasets
(`_open`), which many threads and forked children may read.

fsspec is an optional dependency. Torch is not imported.
"""

import errno
import logging
import os
import stat
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import NamedTuple, NoReturn

from ..arguments import near_word
from ..cache.readers.entry_file import EntryFile
from ..client.dataset import Dataset, connect, list_datasets
from ..errors import DieselError, NotAFolder, NotFoundError, PermissionDenied, UsageError
from ..format.entries import Kind
from ..format.snapshot.reader import Snapshot
from ..names import cut, parse_versioned_name
from ..peers.members.options import TaskKwargs
from ..urls import HostPort

try:
    from fsspec import AbstractFileSystem
    from fsspec.spec import AbstractBufferedFile
    from fsspec.utils import stringify_path, tokenize
except ImportError as error:
    raise ImportError(
        "diesel:// needs fsspec, which is not installed; `pip install fsspec`"
    ) from error

log = logging.getLogger("diesel.fsspec")

BLOCK_BYTES = 256 << 10
"""The bytes that fsspec reads ahead in an open file. Its default of 5 MiB would load and copy a
second chunk for most reads; and whole chunks stay in the dataset's memory anyway."""

WHOLE_BYTES_MAX = 4 << 20
"""`cat_ranges` reads files up to this size, the default size of a chunk, whole. Such a file is
mostly one extent, and any read of an extent reads all of it to verify its checksum."""

_LINE_BYTES = 4096  # read at a time to find the end of a line
_BELOW_A_FILE = -2  # a result of `_follow`
_LINKS_MAX = 40  # as in Linux: a path through more links counts as a loop
_OF_FSSPEC = {
    *("asynchronous", "loop", "batch_size", "use_listings_cache", "listings_expiry_time"),
    *("max_paths", "skip_instance_cache", "default_block_size", "default_cache_type"),
}
"""The options of every fsspec file system. Those about listings have no effect."""

_OPTIONS = ("repository", "user", "key", "memory_bytes", *sorted(TaskKwargs.__optional_keys__))

_SECRETS = {"key": "DIESEL_KEY", "task_key": "DIESEL_TASK_KEY"}
"""The secret options, and the environment variable of each."""

_Key = tuple[str, str, str]  # the options as a token; the server, or ""; the dataset as in the path
_open: dict[_Key, Dataset] = {}  # of all instances; changed with `_opening` held, or by `close`
_opening = threading.Lock()


def _renew_lock() -> None:
    global _opening  # noqa: PLW0603  # a lock that another thread held cannot be released
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


class _Address(NamedTuple):
    server: str  # its URL; "" for the repository of the options
    dataset: str  # NAME or NAME@VERSION; "" for the repository's root
    path: str  # below the dataset


class _Entry(NamedTuple):
    dataset: Dataset
    view: Snapshot  # the version in which it was found
    number: int  # its entry in that version

    @property
    def path(self) -> bytes:
        """The path of the entry itself, not of a link to it. Unlike `number`, it means the same in
        every version."""
        return self.view.path(self.number)


class DieselFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec ships no types
    protocol = "diesel"
    root_marker = ""

    def __init__(
        self,
        *,
        repository: str | None = None,
        user: str | None = None,
        key: str | None = None,
        memory_bytes: int | None = None,
        **options: object,
    ) -> None:
        """Take the arguments of `diesel_fs.connect` and of any fsspec file system. `repository` is
        the `url` of `connect`, since fsspec's `url_to_fs` has an argument `url`. Nothing is opened
        before the first use.

        Other options are ignored, since libraries pass one protocol's options to all protocols; a
        name that is nearly a known one causes a warning. Raises UsageError for `url` and for `fo`
        (a file system below this one).
        """
        if "fo" in options:
            raise UsageError("diesel:// cannot be opened on top of another file system")
        for name in sorted(options.keys() - _OF_FSSPEC - TaskKwargs.__optional_keys__):
            if name == "url":  # otherwise another repository would be read
                raise UsageError(
                    "diesel:// has no option 'url'", advice=f"known: {', '.join(_OPTIONS)}"
                )
            if near := near_word(name, _OPTIONS):
                log.warning("diesel:// has no option %r; is %s meant?", name, near)
        super().__init__(**{name: options[name] for name in options.keys() & _OF_FSSPEC})
        self._repository, self._user, self._key = repository, user, key
        self._memory_bytes = memory_bytes
        self._task: TaskKwargs = {  # type: ignore[assignment]  # `connect` checks the values
            name: options[name] for name in sorted(options.keys() & TaskKwargs.__optional_keys__)
        }
        self._token: str = tokenize(repository, user, key, memory_bytes, self._task)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the options without secrets, which the other process takes from its environment.
        Raises UsageError if a secret differs from this process's environment variable."""
        known = _OF_FSSPEC.union(_OPTIONS)  # options that are not known may hold a secret
        options = {name: each for name, each in self.storage_options.items() if name in known}
        secrets = dict(_SECRETS)
        if "@" in (options.get("repository") or ""):  # it may hold a password
            secrets["repository"] = "DIESEL_URL"
        for name, variable in secrets.items():
            if (value := options.pop(name, None)) and value != os.environ.get(variable):
                raise UsageError(
                    "this file system cannot be pickled: a pickle may hold no secret,"
                    f" such as {name!r}",
                    advice=f"set {variable} in all processes",
                )
        return _make, (type(self), options)

    # Paths

    @classmethod
    def _strip_protocol(cls, path: object) -> object:
        """The path that a URL names, without outer or repeated slashes."""
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        text = stringify_path(path)
        for separator in ("://", "::"):
            text = text.removeprefix(f"{cls.protocol}{separator}")
        return "/".join(filter(None, text.split("/"))) if "//" in text else text.strip("/")

    def _address(self, path: str) -> _Address:
        """Split a path into its parts. Raises UsageError for a server that is malformed or
        contradicts the options, and FileNotFoundError for a name that no dataset can have."""
        first, _, rest = path.partition("/")
        server = ""
        if ":" in first:
            try:
                server = f"{self.protocol}://{HostPort.parse(first)}"
            except ValueError:
                raise UsageError(
                    f"bad server {first!r} in {self.protocol}://{path}",
                    advice=f"write {self.protocol}://HOST:PORT/DATASET/path",
                ) from None
            if self._repository is not None and self._repository.rstrip("/") != server:
                raise UsageError(
                    f"{self.protocol}://{path} names another server than the option `repository`",
                    advice="leave out one of them",
                )
            first, _, rest = rest.partition("/")
        elif self.protocol != DieselFileSystem.protocol:
            raise UsageError(
                f"{self.protocol}://{path} names no server",
                advice=f"write {self.protocol}://HOST:PORT/DATASET/path, or diesel://DATASET/path"
                " with the server in the option `repository` or in DIESEL_URL",
            )
        if first:
            try:
                parse_versioned_name(first)
            except UsageError as error:
                raise FileNotFoundError(errno.ENOENT, str(error), path) from error
        return _Address(server, first, rest)

    def _dataset(self, address: _Address) -> Dataset:
        """The dataset of an address, opened if needed. Raises FileNotFoundError, PermissionError,
        and as `connect`."""
        key = (self._token, address.server, address.dataset)
        if (found := _open.get(key)) is not None:
            return found
        with _opening:
            if (found := _open.get(key)) is None:
                try:
                    found = connect(
                        address.dataset, address.server or self._repository, self._user, self._key,
                        memory_bytes=self._memory_bytes, **self._task,
                    )  # fmt: skip
                except NotFoundError as error:
                    raise FileNotFoundError(errno.ENOENT, str(error), address.dataset) from error
                except PermissionDenied as error:
                    raise PermissionError(errno.EACCES, str(error), address.dataset) from error
                _open[key] = found
        return found

    def _find(self, path: str) -> _Entry:
        """The entry of a path, with links followed. If the open version has none, tries the current
        version. Raises FileNotFoundError; NotAFolder (a subclass of it) if the path goes on below a
        file; IsADirectoryError for a repository's root."""
        address = self._address(path)
        if not address.dataset:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        dataset = self._dataset(address)
        try:
            encoded = os.fsencode(address.path)
        except UnicodeEncodeError:
            raise _absent(path) from None
        view = dataset.snapshot
        index = _follow(view, encoded)
        if index < 0:
            with suppress(FileNotFoundError, UsageError):  # no such path, or an invalid one
                dataset.stat(encoded)
            view = dataset.snapshot
            index = _follow(view, encoded)
        if index == _BELOW_A_FILE:
            raise NotAFolder(f"no {cut(path)!r}: it goes on below a file")
        if index < 0:
            raise _absent(path)
        return _Entry(dataset, view, index)

    def _find_file(self, path: str) -> _Entry:
        """The same as `_find`, but raises IsADirectoryError for a folder."""
        entry = self._find(path)
        if entry.view.stat(entry.number).kind != Kind.FILE:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return entry

    # Metadata

    def info(self, path: str, **kwargs: object) -> dict[str, object]:
        """Name, size in bytes, type, mode and mtime (in seconds) of an entry, with links followed.
        Raises FileNotFoundError."""
        path = self._text(path)
        address = self._address(path)
        if not address.dataset:
            return _described(path, None, -1)
        entry = self._find(path)
        found = _described(path, entry.view, entry.number)
        index = -1
        with suppress(UnicodeEncodeError):
            index = entry.view.lookup(os.fsencode(address.path))
        return _as_link(found, entry.view, index) if index != entry.number else found

    def ls(
        self, path: str, detail: bool = True, **kwargs: object
    ) -> list[dict[str, object]] | list[str]:
        """The entries of a folder, or the datasets of a repository; for a file, the file itself.
        With `detail` each is a result of `info`, otherwise a path. Raises FileNotFoundError."""
        path = self._text(path)
        address = self._address(path)
        if not address.dataset:
            names = list_datasets(address.server or self._repository, self._user, self._key)
            paths = [f"{path}/{name}" if path else name for name in names]
            return [_described(each, None, -1) for each in paths] if detail else paths
        _, view, folder = self._find(path)
        if view.stat(folder).kind != Kind.FOLDER:
            return [self.info(path)] if detail else [path]
        children = view.children(folder)
        paths = [f"{path}/{os.fsdecode(name)}" for name in view.names(children)]
        if not detail:
            return paths
        return [_listed(each, view, i) for each, i in zip(paths, children, strict=True)]

    def exists(self, path: str, **kwargs: object) -> bool:
        """Whether there is such an entry. Unlike fsspec's method, raises an error if that is not
        known."""
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def isfile(self, path: str) -> bool:
        """Whether a path is a file. Unlike fsspec's method, raises an error if that is not
        known."""
        return self.exists(path) and self.info(path)["type"] == "file"

    def du(
        self,
        path: str,
        total: bool = True,
        maxdepth: int | None = None,
        withdirs: bool = False,
        **kwargs: object,
    ) -> int | dict[str, int]:
        """The bytes of all files below a path; with `total=False` a dict of the bytes by path."""
        found = self.find(path, maxdepth=maxdepth, withdirs=withdirs, detail=True)
        if [*found.values()] == [{}]:  # fsspec returns this for a file
            found = {each: self.info(each) for each in found}
        sizes = {each: info["size"] for each, info in found.items()}
        return sum(sizes.values()) if total else sizes

    def modified(self, path: str) -> datetime:
        _, view, index = self._find(self._text(path))
        return datetime.fromtimestamp(view.stat(index).mtime_ns / 1e9, UTC)

    def ukey(self, path: str) -> str:
        """A text that changes if the file's content does. It is made from checksums in the
        snapshot, without reading the content."""
        _, view, index = self._find(self._text(path))
        status = view.stat(index)
        checksums = [extent.checksum for extent in view.extents(index)]
        token: str = tokenize(view.identity.hex, path, status.size, status.mtime_ns, checksums)
        return token

    def checksum(self, path: str) -> int:
        return int(self.ukey(path), 16)

    def invalidate_cache(self, path: str | None = None) -> None:
        """Move the dataset of a path on to its current version; without a path, all open datasets
        with these options. A dataset that was opened at a fixed version stays there."""
        super().invalidate_cache(path)
        address = None if path is None else self._address(self._text(path))
        for (token, server, name), dataset in [*_open.items()]:
            is_meant = address is None or (server, name) == address[:2]
            if token == self._token and is_meant and not dataset.is_kept:
                dataset.refresh()

    def close(self) -> None:
        """Release all datasets that are open with these options, even if other threads use them.
        The next use opens them again."""
        for key in [key for key in _open if key[0] == self._token]:
            if (dataset := _open.pop(key, None)) is not None:
                dataset.close()

    # Contents

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: object
    ) -> bytes:
        """The content of a file from `start` to before `end`, as in a slice."""
        entry = self._find_file(self._text(path))
        if start is None and end is None:
            return entry.dataset.get(entry.path)
        content = entry.dataset.open(entry.path)
        first, stop, _ = slice(start, end).indices(content.size)
        return bytes(content.read_at(first, max(stop - first, 0)))

    def cat(
        self,
        path: str | list[str],
        recursive: bool = False,
        on_error: str = "raise",
        **kwargs: object,
    ) -> bytes | dict[str, bytes | Exception]:
        """The content of one file. For a list of paths, a pattern or `recursive` (which reads all
        files of a folder), a dict of contents by path; chunks are then loaded ahead. For an
        unreadable file, `on_error` is "raise", "omit" or "return" (the exception as the value)."""
        paths: list[str] = self.expand_path(path, recursive=recursive)
        if not isinstance(path, list) and paths == [self._strip_protocol(path)] and not recursive:
            return self.cat_file(paths[0], **kwargs)  # type: ignore[arg-type]  # start and end
        if kwargs:  # `start` or `end`: a part of each file
            found: dict[str, bytes | Exception] = super().cat(
                path, recursive=recursive, on_error=on_error, **kwargs
            )
            return found
        wanted = [each for each in paths if not (recursive and self.isdir(each))]
        contents: dict[str, bytes | Exception] = {}
        for each, content in zip(wanted, self._contents(wanted), strict=True):
            if not isinstance(content, Exception):
                contents[each] = content
            elif on_error == "raise":
                raise content
            elif on_error == "return":
                contents[each] = content
        return contents

    def cat_ranges(
        self,
        paths: list[str],
        starts: int | Sequence[int | None] | None,
        ends: int | Sequence[int | None] | None,
        max_gap: int | None = None,
        on_error: str = "return",
        **kwargs: object,
    ) -> list[bytes | Exception]:
        """A part of each of `paths`, in order: from its start to before its end, as in a slice.
        With `on_error="return"` the exception takes the place of an unreadable part. (`max_gap` has
        no effect: the reader itself merges neighbouring ranges.)"""
        firsts = [*starts] if isinstance(starts, Sequence) else [starts] * len(paths)
        stops = [*ends] if isinstance(ends, Sequence) else [ends] * len(paths)
        if not len(firsts) == len(stops) == len(paths):
            raise ValueError(f"{len(paths)} paths, {len(firsts)} starts and {len(stops)} ends")
        names = [self._text(each) for each in paths]
        small = [name for name in dict.fromkeys(names) if self._is_small(name)]
        whole = dict(zip(small, self._contents(small), strict=True))
        parts: list[bytes | Exception] = []
        for name, first, stop in zip(names, firsts, stops, strict=True):
            content = whole.get(name)
            try:
                if content is None:
                    parts.append(self.cat_file(name, first, stop))
                elif isinstance(content, Exception):
                    raise content
                else:
                    parts.append(content[first:stop])
            except Exception as error:
                if on_error == "raise":
                    raise
                parts.append(error)
        return parts

    def _is_small(self, path: str) -> bool:
        try:
            _, view, index = self._find_file(path)
        except OSError:
            return False
        return view.size(index) <= WHOLE_BYTES_MAX

    def _contents(self, paths: Iterable[str]) -> Iterator[bytes | Exception]:
        found: list[_Entry | Exception] = []
        for path in paths:
            try:
                found.append(self._find_file(path))
            except (OSError, DieselError) as error:
                found.append(error)
        entries = [each for each in found if isinstance(each, _Entry)]
        readers = {id(each.dataset): each.dataset for each in entries}
        streams = {
            number: _read_many(dataset, [each.path for each in entries if each.dataset is dataset])
            for number, dataset in readers.items()
        }
        for each in found:
            yield each if isinstance(each, Exception) else next(streams[id(each.dataset)])

    def _open(self, path: str, mode: str = "rb", *arguments: object, **kwargs: object) -> object:
        if mode != "rb":
            self._refuse()
        return DieselFile(self, path, mode, *arguments, **kwargs)

    def content(self, path: str) -> EntryFile:
        """A reader of the file's content at the present version. Raises as `open`."""
        entry = self._find_file(path)
        return entry.dataset.open(entry.path)

    def _text(self, path: str) -> str:
        text: str = self._strip_protocol(path)  # type: ignore[assignment]  # it is no list
        return text

    # Writing

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise OSError(
            errno.EROFS,
            f"{self.protocol}:// is read-only; write with `dlcmd put` or `diesel_fs.Dataset.put`",
        )

    mkdir = makedirs = rmdir = touch = pipe_file = put_file = cp_file = rm_file = _rm = rm = _refuse
    put = copy = mv = start_transaction = _refuse


class DieselTlsFileSystem(DieselFileSystem):
    """The file system of servers with TLS (`diesel+tls://HOST:PORT/DATASET/path`)."""

    protocol = "diesel+tls"


class DieselFile(AbstractBufferedFile):  # type: ignore[misc]  # fsspec ships no types
    """An open file. It stays at the version in which it was opened."""

    DEFAULT_BLOCK_SIZE = BLOCK_BYTES

    def __init__(
        self, fs: DieselFileSystem, path: str, *arguments: object, **kwargs: object
    ) -> None:
        """Open `path`. An unpickled file passes its former `size`, which is ignored: the file may
        have another size now."""
        self._content = fs.content(path)
        super().__init__(fs, path, *arguments, **{**kwargs, "size": self._content.size})

    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self._content.read_at(start, end - start))

    def readline(self, size: int | None = -1, /) -> bytes:
        """The next line, up to `size` bytes. fsspec's method copies a whole block for each line."""
        start = self.tell()
        line: bytes = self.readuntil(b"\n", blocks=_LINE_BYTES)
        if size is not None and 0 <= size < len(line):
            self.seek(start + size)
            return line[:size]
        return line


def _make(kind: type[DieselFileSystem], options: dict[str, object]) -> DieselFileSystem:
    return kind(**options)  # type: ignore[arg-type]  # they were checked when it was first made


def _absent(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _follow(view: Snapshot, path: bytes) -> int:
    """The entry of a path, with links followed as by the kernel; -1 if there is none, _BELOW_A_FILE
    if the path goes on below a file. A link that leads out of the dataset counts as dangling."""
    index = view.lookup(path)
    if index >= 0 and view.stat(index).kind != Kind.LINK:
        return index
    at, links, names = 0, 0, deque(path.split(b"/"))
    while names:
        name = names.popleft()
        if name and view.stat(at).kind != Kind.FOLDER:
            return _BELOW_A_FILE
        if name == b"..":
            if at == 0:
                return -1
            at = view.parent(at)
        elif name not in (b"", b"."):
            child = view.child(at, name)
            if child < 0:
                return -1
            if view.stat(child).kind == Kind.LINK:
                links += 1
                target = view.link(child)
                if links > _LINKS_MAX or target.startswith(b"/"):
                    return -1
                names.extendleft(reversed(target.split(b"/")))
            else:
                at = child
    return at


_TYPES = {Kind.FILE: ("file", stat.S_IFREG), Kind.FOLDER: ("directory", stat.S_IFDIR)}


def _described(path: str, view: Snapshot | None, index: int) -> dict[str, object]:
    """The result of `info`; without a view, for a dataset or the repository."""
    if view is None:
        return {"name": path, "size": 0, "type": "directory", "islink": False}
    status = view.stat(index)
    kind, bits = _TYPES[status.kind]
    return {
        "name": path,
        "size": status.size if status.kind == Kind.FILE else 0,
        "type": kind,
        "mode": bits | status.mode,
        "mtime": status.mtime_ns / 1e9,
        "islink": False,
    }


def _listed(path: str, view: Snapshot, index: int) -> dict[str, object]:
    """The details of an entry in `ls`. A link to a file is described as that file, any other link
    as "other"."""
    if view.stat(index).kind != Kind.LINK:
        return _described(path, view, index)
    target = _follow(view, view.path(index))
    if target >= 0 and view.stat(target).kind == Kind.FILE:
        return _as_link(_described(path, view, target), view, index)
    other = {
        "name": path, "size": 0, "type": "other", "mode": stat.S_IFLNK | 0o777,
        "mtime": view.stat(index).mtime_ns / 1e9,
    }  # fmt: skip
    return _as_link(other, view, index)


def _as_link(info: dict[str, object], view: Snapshot, index: int) -> dict[str, object]:
    if index >= 0 and view.stat(index).kind == Kind.LINK:
        info |= {"islink": True, "destination": os.fsdecode(view.link(index))}
    return info


def _read_many(dataset: Dataset, paths: list[bytes]) -> Iterator[bytes | Exception]:
    """The content of each file, or its error. Chunks are loaded ahead until a file fails; later
    files are read singly."""
    done = 0
    with suppress(DieselError):
        for view in dataset.read_many(paths):
            yield bytes(view)
            done += 1
    for path in paths[done:]:
        try:
            yield dataset.get(path)
        except DieselError as error:
            yield error
