"""A source: a thing that the dashboard watches, in a thread of its own.

The watcher calls `ask` at each tick, and waits a little for all answers. A source that does not
answer keeps its last figures, and says since when it has not answered.
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping

from diesel_fs.errors import DieselError

from .history import History

log = logging.getLogger("diesel.dashboard")

Described = dict[str, object]
"""An object of JSON."""


class Source(ABC):
    """A source: `refresh` fetches its figures, `describe` makes the page's part, `point` the
    history's.

    `refresh` is called in the source's own thread, everything else in the watcher's. Subclasses
    guard what both use by `lock`.
    """

    least_s = 0.0
    """The shortest time between two requests."""

    late_s = 3.0
    """A source counts as late if it has not answered for this time."""

    def __init__(self, source_id: str, history: History) -> None:
        self.id = source_id
        self.history = history
        self.lock = threading.Lock()
        self.is_done = threading.Event()
        self.is_done.set()
        self.problem = ""
        """Why there is no newer answer; empty if there is one."""
        self.answered_s = 0.0
        """When the last answer came, by the monotonic clock; 0: never."""
        self._asked_s = 0.0
        self._wanted = threading.Event()
        self._is_ended = False
        # A daemon thread: one that hangs in a system call does not keep the program from ending.
        self._thread = threading.Thread(target=self._run, name=f"source {source_id}", daemon=True)
        self._thread.start()

    @abstractmethod
    def refresh(self) -> None:
        """Ask the source once, and keep its answer. Raises DieselError, OSError."""

    @abstractmethod
    def describe(self) -> Described:
        """The newest facts, for the page."""

    @abstractmethod
    def point(self) -> Mapping[str, float] | None:
        """The figures since the last call, for the history; None where nothing is known."""

    def ask(self) -> None:
        """Have the source asked, unless it is being asked, or was asked less than `least_s` ago."""
        now_s = time.monotonic()
        if self.is_done.is_set() and now_s >= self._asked_s + self.least_s:
            self._asked_s = now_s
            self.is_done.clear()
            self._wanted.set()

    def end(self) -> None:
        self._is_ended = True
        self._wanted.set()

    @property
    def state(self) -> str:
        """`new` (no answer yet), `live`, `late` (no answer for a while) or `lost` (it said why)."""
        if self.problem:
            return "lost"
        if not self.is_done.is_set() and time.monotonic() > self._asked_s + self.late_s:
            return "late"
        return "live" if self.answered_s else "new"

    def standing(self) -> Described:
        """The state, the problem, and how long ago the last answer came (null: never)."""
        age_s = round(time.monotonic() - self.answered_s, 1) if self.answered_s else None
        return {"id": self.id, "state": self.state, "problem": self.problem, "age_s": age_s}

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._is_ended:
                self.is_done.set()
                return
            problem = ""
            try:
                self.refresh()
            except DieselError as error:
                problem = error.message
            except OSError as error:
                problem = error.strerror or type(error).__name__
            except Exception as error:  # the other sources go on
                log.exception("a bug in asking %s", self.id)
                problem = f"unexpected {type(error).__name__}"
            else:
                self.answered_s = time.monotonic()
            self.problem = problem
            self.is_done.set()
