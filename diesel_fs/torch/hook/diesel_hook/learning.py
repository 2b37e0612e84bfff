"""Learns which files a dataset opens for each index, where the dataset does not say it.

While a dataset is learned, the `__getitem__` of its class notes which index is read, and an audit
hook notes which files Python opens meanwhile. Native readers open files that Python does not see:
some are wrapped by name. This happens where samples are read: in the workers of a `DataLoader`, or
in the process itself if it has none. What was found goes to the launcher, which keeps the files
that lie in mounts.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
import threading
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .link import Link

_SEND_S = 0.02
_WRITES = os.O_WRONLY | os.O_RDWR

_READERS = (
    ("cv2", "imread"),
    ("torchvision.io.image", "read_file"),
    ("torchvision.io", "read_file"),
    ("h5py", "File.__init__"),
    ("soundfile", "SoundFile.__init__"),
)
"""Functions that open the file in their first argument (of a method, the first after `self`)."""

_WITH_INDICES = 2  # arguments of `__getitems__`: the dataset and a list

if TYPE_CHECKING:
    Path = str | bytes
    Steps = Sequence[str | int]
    """How one comes from a loader's dataset to one inside: attributes, and indices of lists."""


class _Function(Protocol):
    """A function or a method of somebody else's."""

    def __call__(self, *arguments: object, **named: object) -> object: ...


class _Known(NamedTuple):
    """A dataset that is learned."""

    dataset: object
    table: str  # the launcher's name for what is known
    indices: set[int]  # those that are known


class Learner:
    """Notes which files datasets open, and sends it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._known: dict[int, _Known] = {}  # by id of the dataset
        self._opened: list[Path] | None = None  # while a sample is read
        self._found: dict[str, list[tuple[int, list[Path]]]] = {}  # not sent yet, by table
        self._lock = threading.Lock()  # for what was found
        os.register_at_fork(after_in_child=self._after_fork)
        self._undo: list[Callable[[], None]] = []
        self._seen_modules: set[str] = set()
        self._is_watching = False

    def learn(self, dataset: object, table: str) -> None:
        """Note from now on what this dataset opens."""
        if id(dataset) in self._known:
            return
        if not self._is_watching:
            sys.addaudithook(self._on_event)
            self._is_watching = True
        self._known[id(dataset)] = _Known(dataset, table, set())
        kind = type(dataset)
        self._wrap(kind, "__getitem__", self._item_reader)
        if hasattr(kind, "__getitems__"):
            self._wrap(kind, "__getitems__", self._batch_reader)

    def stop(self) -> None:
        """Send what was found, and note nothing any more."""
        if not self._known:
            return
        self.flush()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._seen_modules.clear()
        self._known.clear()

    def flush(self) -> None:
        """Send what was found. Any thread."""
        with self._lock:
            found, self._found = self._found, {}
        for table, samples in found.items():
            counts = array("q")
            for index, paths in samples:
                counts.extend((index, len(paths)))
            opened = b"\0".join(os.fsencode(path) for _, paths in samples for path in paths)
            self._link.send(
                {"do": "learned", "table": table, "samples": len(samples), "cwd": os.getcwd()},
                counts.tobytes() + opened,
            )

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        self._found = {}  # the parent sends it

    def _on_event(self, event: str, arguments: tuple[object, ...]) -> None:
        """Python's audit hook. It cannot be removed, so it must cost nothing later."""
        opened = self._opened
        if opened is not None and event == "open":
            path, _, flags = arguments
            if not (isinstance(flags, int) and flags & _WRITES):
                _add(opened, path)

    def _item_reader(self, original: _Function) -> _Function:
        @functools.wraps(original)
        def __getitem__(*arguments: object, **named: object) -> object:
            known = self._being_learned(arguments)
            if known is None:
                return original(*arguments, **named)
            return self._read(known, arguments[1:2], lambda: original(*arguments, **named))

        return __getitem__

    def _batch_reader(self, original: _Function) -> _Function:
        @functools.wraps(original)
        def __getitems__(*arguments: object, **named: object) -> object:
            known = self._being_learned(arguments)
            if known is None or len(arguments) < _WITH_INDICES:
                return original(*arguments, **named)
            return self._read(known, arguments[1], lambda: original(*arguments, **named))

        return __getitems__

    def _being_learned(self, arguments: Sequence[object]) -> _Known | None:
        """What is known of the dataset that a method is called of; None where it is not learned,
        or is read by another that is."""
        known = self._known.get(id(arguments[0]))
        return None if known is None or self._opened is not None else known

    def _read(self, known: _Known, indices: object, read: Callable[[], object]) -> object:
        """Read samples, and note what is opened, shared out equally in the order of opening."""
        try:
            wanted = [operator.index(each) for each in indices]  # type: ignore[attr-defined] # or it raises
        except (TypeError, ValueError):  # a slice, or a key of the user's
            return read()
        if not wanted or known.indices.issuperset(wanted):
            return read()
        self._wrap_readers(type(known.dataset))
        opened: list[Path] = []
        self._opened = opened
        try:
            result = read()
        finally:
            self._opened = None
        if len(wanted) == 1:
            opened = list(dict.fromkeys(opened))
        share, rest = divmod(len(opened), len(wanted))
        if not rest:  # otherwise nobody knows which sample opened which
            new = [
                (index, opened[at * share : (at + 1) * share])
                for at, index in enumerate(wanted)
                if index not in known.indices
            ]
            known.indices.update(wanted)
            with self._lock:
                is_first = not self._found
                self._found.setdefault(known.table, []).extend(new)
            if is_first:
                timer = threading.Timer(_SEND_S, self.flush)
                timer.daemon = True
                timer.start()
        return result

    def _wrap_readers(self, kind: type) -> None:
        """Wrap the native readers that are imported by now."""
        for module_name, name in _READERS:
            module = sys.modules.get(module_name)
            if module is None or f"{module_name}.{name}" in self._seen_modules:
                continue
            self._seen_modules.add(f"{module_name}.{name}")
            holder, _, attribute = name.rpartition(".")
            owner = getattr(module, holder, None) if holder else module
            original = getattr(owner, attribute, None)
            if owner is None or original is None:
                continue
            at = 1 if holder else 0
            self._wrap(owner, attribute, functools.partial(self._native_reader, at))
            # A module of the user's may have taken the function by `from ... import`.
            for user in {sys.modules.get(each.__module__) for each in kind.__mro__}:
                for alias, value in list(vars(user).items() if user is not None else ()):
                    if value is original and user is not owner:
                        self._replace(user, alias, getattr(owner, attribute))

    def _native_reader(self, at: int, original: _Function) -> _Function:
        @functools.wraps(original)
        def reader(*arguments: object, **named: object) -> object:
            if self._opened is not None and len(arguments) > at:
                _add(self._opened, arguments[at])
            return original(*arguments, **named)

        return reader

    def _wrap(self, owner: object, name: str, make: Callable[[_Function], _Function]) -> None:
        """Replace a function of a class or a module until `stop`."""
        self._replace(owner, name, make(getattr(owner, name)))

    def _replace(self, owner: object, name: str, value: object) -> None:
        own = vars(owner).get(name, _ABSENT)
        with suppress(TypeError, AttributeError):  # a class of C: what it opens is not learned
            setattr(owner, name, value)
            self._undo.append(functools.partial(_restore, owner, name, own))


_ABSENT = object()


def _restore(owner: object, name: str, value: object) -> None:
    if value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _add(opened: list[Path], path: object) -> None:
    """Note a path; anything else, such as the number of an open file, is none."""
    if isinstance(path, (str, bytes)):
        opened.append(path)
    elif isinstance(path, os.PathLike):
        opened.append(os.fspath(path))


def inside(dataset: object, steps: Steps) -> object:
    """The dataset that lies in another."""
    for step in steps:
        dataset = dataset[step] if isinstance(step, int) else getattr(dataset, step)  # type: ignore[index] # a list
    return dataset


_REMAKE = (
    "(lambda hook: hook.learning_workers(*parts) if hook else parts[2])"
    "(__import__('sys').modules.get('diesel_hook'))"
)
"""What a pickle of `LearningWorkers` evaluates: it needs nothing but Python."""


class LearningWorkers:
    """The `worker_init_fn` of a loader whose workers learn; the user's own runs behind it.

    It is pickled where workers are spawned. A worker that has not joined, since the script has
    changed PYTHONPATH, cannot import this module: there the user's own comes out of the pickle.
    """

    def __init__(
        self,
        socket_path: str,
        wanted: Sequence[tuple[Steps, str]],
        users: Callable[[int], object] | None,
    ) -> None:
        self._socket_path = socket_path
        self._wanted = wanted
        self._users = users

    def __reduce__(self) -> tuple[object, ...]:
        parts = self._socket_path, self._wanted, self._users
        return eval, (_REMAKE, {"parts": parts})

    def __call__(self, worker: int) -> None:
        with suppress(Exception):  # the worker goes on as it would without us
            self._learn()
        if self._users is not None:
            self._users(worker)

    def _learn(self) -> None:
        info = sys.modules["torch.utils.data"].get_worker_info()
        learner = Learner(Link(self._socket_path))
        for steps, table in self._wanted:
            learner.learn(inside(info.dataset, steps), table)
        ends = sys.modules["multiprocessing.util"].Finalize  # this is a process of multiprocessing
        ends(learner, learner.flush, exitpriority=0)
