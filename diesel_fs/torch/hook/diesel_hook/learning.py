"""Observes which files a dataset opens for each index, and reports them to the launcher.

This happens in the processes that read the samples: the loader's workers, if it has any. The
wrapped `__getitem__` of the dataset's class records the index, and an audit hook records the files
that Python opens meanwhile. Audit hooks do not see the files that native libraries open, so some of
their readers are wrapped by name. An audit hook cannot be removed, so there is none while samples
are only checked: then the functions that open files are wrapped during a check.

A few samples are *checked*: the first ones of an epoch, then one in a second. Their files are sent
in any case, so that the launcher notices a plan of files that are never read. If a listed file was
not seen, the following checks use inotify (`opens.py`), since a native library may have read it.
All other samples are *learned* in the first epochs, unless the dataset has a list and opens nothing
else. While there is nothing to observe, the class is not wrapped, so a loop pays only for the
checks.
"""

from __future__ import annotations

import builtins
import functools
import io
import operator
import os
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

from .files import FileListing, NestedDataset
from .link import Link
from .pace import Turns, TurnTaker

_SEND_S = 0.02  # records are collected for this long, then sent together
_CHECKED_FIRST = 16  # first samples of an epoch, in each process
_CHECK_S = 1.0  # between two later checks
_CHECKED_ROWS_MAX = 256  # the most reported samples of a checked batch
_WRITES = os.O_WRONLY | os.O_RDWR

_READERS = (
    ("cv2", "imread"),
    ("torchvision.io.image", "read_file"),
    ("torchvision.io", "read_file"),
    ("h5py", "File.__init__"),
    ("soundfile", "SoundFile.__init__"),
)
"""Native readers, by module and name: they open the file in their first argument (after `self`)."""

_WITH_INDICES = 2  # the arguments of `__getitems__`: the dataset and a list

if TYPE_CHECKING:
    from .files import Steps
    from .opens import Opens

    Path = str | bytes
    Row = tuple[int, bool, Sequence[Path]]
    """An observed sample: its index, whether it was checked, and the files that it opened."""


class _Function(Protocol):
    def __call__(self, *arguments: object, **named: object) -> object: ...


class _Known:
    """A dataset of this process whose samples are observed.

    `may_learn`: samples may be learned in this epoch. `learns`: they are being learned; otherwise
    only checks are made. `indices`: the observed samples. `is_suspected`: a listed file was not
    seen, so checks use inotify.
    """

    def __init__(self, dataset: object, part: NestedDataset, *, may_learn: bool) -> None:
        try:
            self.dataset: Callable[[], object] = weakref.ref(dataset)
        except TypeError:  # its class allows no weak references
            self.dataset = lambda: dataset
        self.kind = type(dataset)
        self.table = part.table
        self._listing = FileListing(dataset) if part.is_listed else None
        self.may_learn = may_learn
        self.learns = may_learn and not part.is_listed
        self.indices: set[int] = set()
        self.is_suspected = False
        self._checked = 0  # the number of checked samples
        self._checked_s = 0.0  # when the last one was checked

    def is_due(self) -> bool:
        return self._checked < _CHECKED_FIRST or time.monotonic() - self._checked_s >= _CHECK_S

    def is_idle(self) -> bool:
        return not self.learns and not self.is_due()

    def checks(self, samples: int) -> None:
        self._checked += samples
        self._checked_s = time.monotonic()

    def suspect(self) -> None:
        """Use inotify from now on, since a listed file was not seen; as many checks are due as at
        the start of an epoch."""
        self.is_suspected, self._checked = True, 0

    def listed(self, indices: Sequence[int], *, always: bool = True) -> list[str]:
        """The listed paths of these samples. The result is empty if the dataset has no list, or,
        without `always`, if a look-up in it is slow."""
        if self._listing is None or (self._listing.is_slow and not always):
            return []
        dataset = self.dataset()
        return [each for each in (self._listing.path(dataset, at) for at in indices) if each]


class _Reading:
    """One call of `__getitem__` or `__getitems__`, and the files opened in it. `is_mixed`: another
    thread has read samples meanwhile, so the files cannot be assigned."""

    def __init__(self) -> None:
        self.paths: list[Path] = []
        self.thread = threading.get_ident()
        self.is_mixed = False


class Learner:
    """Observes the datasets of this process, and reports their files to the launcher."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._known: dict[int, _Known] = {}  # by id of the dataset
        self._reading: _Reading | None = None  # while a sample is read
        self._found: dict[str, list[Row]] = {}  # records that must still be sent, by table
        self._lock = threading.Lock()  # guards `_found`
        self._opens: Opens | None = None  # kept until the records are sent
        self._opens_lock = threading.RLock()
        os.register_at_fork(after_in_child=self._after_fork)
        self._undo: list[Callable[[], None]] = []
        self._undo_opens: list[Callable[[], None]] = []
        self._checking = 0  # the threads that are in `_watching`
        self._seen_modules: set[str] = set()
        self._wraps = threading.RLock()  # held while classes and functions are wrapped or restored
        self._is_watching = False
        self._timers: list[threading.Timer] = []

    def learn(self, dataset: object, part: NestedDataset, *, may_learn: bool) -> None:
        """Observe the files that this dataset opens; without `may_learn`, only those of checked
        samples."""
        if id(dataset) in self._known or not hasattr(type(dataset), "__getitem__"):
            return
        known = _Known(dataset, part, may_learn=may_learn)
        if known.learns:
            self._watch_all()
        with self._wraps:
            self._unwrap()
            self._known[id(dataset)] = known
            self._wrap_all()

    def _watch_all(self) -> None:
        """See all files that Python opens from now on, which costs a microsecond for each."""
        if not self._is_watching:
            sys.addaudithook(self._on_event)
            self._is_watching = True

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """See the files that Python opens within this context, by the usual names of `open`. Other
        names, such as those that a module has imported, are not seen."""
        if self._is_watching:
            yield
            return
        has_begun = False
        try:
            with self._wraps:
                has_begun = True
                self._checking += 1  # threads
                if self._checking == 1:
                    self._wrap_opens()
            yield
        finally:
            if has_begun:
                with self._wraps:
                    self._checking -= 1
                    if not self._checking:
                        self._unwrap_opens()

    def _wrap_opens(self) -> None:
        for module in (builtins, io, os):
            original = module.open
            module.open = opening = self._opener(original)  # type: ignore[attr-defined] # each has `open`
            undo = functools.partial(_restore, module, "open", original, opening)
            self._undo_opens.append(undo)

    def _unwrap_opens(self) -> None:
        while self._undo_opens:
            self._undo_opens.pop()()

    def _opener(self, original: _Function) -> _Function:
        @functools.wraps(original)
        def opening(*arguments: object, **named: object) -> object:
            with suppress(Exception):  # the hook may never raise in the program
                how = arguments[1] if len(arguments) > 1 else named.get("mode")
                is_writing = not isinstance(how, int) and not set("wax+").isdisjoint(str(how))
                flags = how if isinstance(how, int) else os.O_RDWR * is_writing
                path = arguments[0] if arguments else named.get("file", named.get("path"))
                self._on_event("open", (path, None, named.get("flags", flags)))
            return original(*arguments, **named)

        return opening

    def stop(self) -> None:
        """Send the records, restore all classes and functions, and end the timers."""
        if not self._known:
            return
        self.flush()
        with self._wraps:
            self._unwrap()
            self._known.clear()
        # Python warns if the program forks while threads exist.
        timers, self._timers = self._timers, []
        for each in timers:
            each.cancel()
            each.join()
        self._close_opens()

    def _later(self, wait_s: float, act: Callable[[], None]) -> None:
        timer = threading.Timer(wait_s, act)
        timer.daemon = True
        self._timers = [each for each in self._timers if each.is_alive()] + [timer]
        timer.start()

    def _wrap_all(self) -> None:
        for kind in dict.fromkeys(each.kind for each in self._known.values()):
            self._wrap(kind, "__getitem__", self._item_reader)
            if hasattr(kind, "__getitems__"):
                self._wrap(kind, "__getitems__", self._batch_reader)

    def _unwrap(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._seen_modules.clear()

    def _rest(self) -> None:
        """Unwrap the classes until the next check is due, if all datasets are idle."""
        with self._wraps:
            if self._undo and all(each.is_idle() for each in self._known.values()):
                self._unwrap()
                self._later(_CHECK_S, self._wake)

    def _wake(self) -> None:
        with self._wraps, suppress(Exception):
            if self._known and not self._undo:
                self._wrap_all()

    def flush(self) -> None:
        """Send the records. Any thread may call it."""
        with self._lock:
            found, self._found = self._found, {}
        for table, rows in found.items():
            numbers = array("q")
            for index, is_checked, paths in rows:
                numbers.extend((index, is_checked, len(paths)))
            opened = b"\0".join(os.fsencode(path) for *_, paths in rows for path in paths)
            self._link.send(
                {"do": "learned", "table": table, "samples": len(rows), "cwd": os.getcwd()},
                numbers.tobytes() + opened,
            )

    def _flush_and_close(self) -> None:
        self.flush()
        self._close_opens()

    def _close_opens(self) -> None:
        with self._opens_lock:
            opens, self._opens = self._opens, None
        if opens is not None:
            opens.close()

    def _after_fork(self) -> None:
        self._lock, self._opens_lock = threading.Lock(), threading.RLock()
        self._wraps = threading.RLock()
        self._found = {}  # the parent sends it
        self._opens = self._reading = None
        self._checking = 0
        self._unwrap_opens()
        self._timers = []

    def _on_event(self, event: str, arguments: tuple[object, ...]) -> None:
        """The audit hook: records the path of a file that is opened for reading while a sample is
        read. It cannot be removed, so it must cost nothing otherwise. It must not raise, since that
        would raise in the program."""
        reading = self._reading
        if reading is not None and event == "open":
            with suppress(Exception):  # any code may raise such an event, with any arguments
                path, _, flags = arguments
                if not (isinstance(flags, int) and flags & _WRITES):
                    _add(reading.paths, path)

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
        """The dataset of a call whose samples must be observed now. The result is None also within
        another observed call, to which the files then belong."""
        known = self._known.get(id(arguments[0]))
        if known is None:
            return None
        if known.is_idle():
            return None
        reading = self._reading
        if reading is not None:
            reading.is_mixed |= reading.thread != threading.get_ident()
            return None
        return known if known.dataset() is arguments[0] else None

    def _read(self, known: _Known, indices: object, read: Callable[[], object]) -> object:
        try:
            wanted = [operator.index(each) for each in indices]  # type: ignore[attr-defined] # or it raises
        except (TypeError, ValueError):  # a slice, or a key of the user's
            return read()
        is_due = known.is_due()
        if not wanted or (not is_due and known.indices.issuperset(wanted)):
            return read()
        with suppress(Exception):
            self._wrap_readers(known.kind)
        if is_due:
            known.checks(len(wanted))
            if known.is_suspected:
                return self._read_suspected(known, wanted, read)
        return self._noted(known, wanted, read, None, is_due=is_due)

    def _read_suspected(
        self, known: _Known, wanted: Sequence[int], read: Callable[[], object]
    ) -> object:
        """Read and check samples, with inotify on their listed files."""
        with self._opens_lock:
            opens = None
            with suppress(Exception):  # if this fails, the listed files count as opened
                from .opens import Opens  # noqa: PLC0415  (few processes need ctypes)

                self._opens = self._opens or Opens()
                self._opens.watch(known.listed(wanted))
                opens = self._opens
            return self._noted(known, wanted, read, opens, is_due=True)

    def _noted(
        self,
        known: _Known,
        wanted: Sequence[int],
        read: Callable[[], object],
        opens: Opens | None,
        *,
        is_due: bool,
    ) -> object:
        reading = self._reading = _Reading()
        try:
            with self._watching():
                result = read()
        finally:
            self._reading = None
        with suppress(Exception):
            if not reading.is_mixed:
                self._note(known, wanted, reading.paths, opens, is_due=is_due)
            if known.is_idle():
                self._rest()
        return result

    def _note(
        self,
        known: _Known,
        wanted: Sequence[int],
        opened: list[Path],
        opens: Opens | None,
        *,
        is_due: bool,
    ) -> None:
        if len(wanted) == 1:
            opened = list(dict.fromkeys(opened))
        listed = known.listed(wanted, always=is_due)
        missing = _absent(listed, opened)
        if missing and is_due:
            if not known.is_suspected:
                known.suspect()  # inotify watches the next ones
                is_due = False
            else:
                seen = set(missing) if opens is None else opens.opened()
                opened = opened + [each for each in missing if each in seen]
        if listed and len(listed) == len(wanted) and not _absent(opened, listed):
            if not is_due:
                known.indices.update(wanted)
                return  # no other file, so the list is complete
            unseen = set(_absent(listed, opened))
            new: list[Row] = [
                (index, True, [] if path in unseen else [path])
                for index, path in zip(wanted, listed)  # noqa: B905 (Python 3.9 has no `strict`)
            ]
        else:
            known.learns = known.may_learn
            if known.learns:
                self._watch_all()
            # Each sample gets an equal share, in the order of opening.
            share, rest = divmod(len(opened), len(wanted))
            if rest:
                return  # the files cannot be assigned to samples
            new = [
                (index, is_due, opened[at * share : (at + 1) * share])
                for at, index in enumerate(wanted)
                if is_due or index not in known.indices
            ]
        known.indices.update(wanted)
        self._keep(known.table, new if known.learns else new[:_CHECKED_ROWS_MAX])

    def _keep(self, table: str, rows: Sequence[Row]) -> None:
        with self._lock:
            is_first = not self._found
            self._found.setdefault(table, []).extend(rows)
        if is_first:
            self._later(_SEND_S, self._flush_and_close)

    def _wrap_readers(self, kind: type) -> None:
        if not self._undo:
            return
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
            # A module of the user's may have imported the function by `from ... import`.
            for user in {sys.modules.get(each.__module__) for each in kind.__mro__}:
                for alias, value in list(vars(user).items() if user is not None else ()):
                    if value is original and user is not owner:
                        self._replace(user, alias, getattr(owner, attribute))

    def _native_reader(self, at: int, original: _Function) -> _Function:
        @functools.wraps(original)
        def reader(*arguments: object, **named: object) -> object:
            reading = self._reading
            if reading is not None and len(arguments) > at:
                _add(reading.paths, arguments[at])
            return original(*arguments, **named)

        return reader

    def _wrap(self, owner: object, name: str, make: Callable[[_Function], _Function]) -> None:
        self._replace(owner, name, make(getattr(owner, name)))

    def _replace(self, owner: object, name: str, value: object) -> None:
        own = vars(owner).get(name, _ABSENT)
        with suppress(TypeError, AttributeError):  # a class of C: its files are not learned
            setattr(owner, name, value)
            self._undo.append(functools.partial(_restore, owner, name, own, value))


_ABSENT = object()


def _restore(owner: object, name: str, value: object, ours: object) -> None:
    """Set an attribute back to `value`, unless the program has replaced `ours`."""
    if vars(owner).get(name) is not ours:
        return
    if value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _add(opened: list[Path], path: object) -> None:
    """Record a path; ignore other values, such as a file descriptor."""
    if isinstance(path, (str, bytes)):
        opened.append(path)
    elif isinstance(path, os.PathLike):
        opened.append(os.fspath(path))


def _absent(paths: Sequence[Path], among: Sequence[Path]) -> list[str]:
    """Those of `paths` that are not `among` the others; relative and absolute paths are equal."""
    left = set(map(os.fsdecode, paths)) - set(map(os.fsdecode, among))
    if not left:
        return []
    absolute = {os.path.abspath(os.fsdecode(each)) for each in among}
    return [each for each in map(os.fsdecode, paths) if os.path.abspath(each) not in absolute]


def inside(dataset: object, steps: Steps) -> object:
    for step in steps:
        dataset = dataset[step] if isinstance(step, int) else getattr(dataset, step)  # type: ignore[index] # a list
    return dataset


_REMAKE = (
    "(lambda hook: hook.learning_workers(*parts) if hook else parts[2])"
    "(__import__('sys').modules.get('diesel_hook'))"
)
"""The expression that a pickle of `LearningWorkers` evaluates, which needs only Python. In a
process that has not joined it gives the user's own function (`parts[2]`)."""


class LearningWorkers:
    """The `worker_init_fn` of a loader whose workers observe their samples and take turns
    (`pace.py`). It also calls the user's own.

    It is pickled if workers are spawned. A worker that has not joined, because the script has
    changed PYTHONPATH, cannot import this module: there the pickle gives the user's own function.
    """

    def __init__(
        self,
        socket_path: str,
        wanted: Sequence[NestedDataset],
        users: Callable[[int], object] | None,
        may_learn: bool,
        turns: Sequence[object] | None,
    ) -> None:
        """`turns`: the parts of a `pace.Turns`; None if the workers take no turns."""
        self._socket_path = socket_path
        self._wanted = wanted
        self._users = users
        self._may_learn = may_learn
        self._turns = turns

    def __reduce__(self) -> tuple[object, ...]:
        # A worker that has not joined cannot import our classes.
        wanted = [tuple(each) for each in self._wanted]
        turns = None if self._turns is None else tuple(self._turns)
        parts = self._socket_path, wanted, self._users, self._may_learn, turns
        return eval, (_REMAKE, {"parts": parts})

    def __call__(self, worker: int) -> None:
        with suppress(Exception):
            self._learn()
        with suppress(Exception):
            if self._turns is not None:
                TurnTaker(Turns._make(self._turns), worker).install()
        if self._users is not None:
            self._users(worker)

    def _learn(self) -> None:
        info = sys.modules["torch.utils.data"].get_worker_info()
        learner = Learner(Link(self._socket_path))
        for part in map(NestedDataset._make, self._wanted):
            learner.learn(inside(info.dataset, part.steps), part, may_learn=self._may_learn)
        ends = sys.modules["multiprocessing.util"].Finalize  # this is a process of multiprocessing
        ends(learner, learner.flush, exitpriority=0)
