"""A mount, server or repository that the dashboard watches, with a thread of its own.

`watcher.py` calls `refresh_soon` of each at every tick, and waits at most `ANSWERS_S` for
`is_done`. Without an answer by then, the page shows the last figures and their age.
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


class Watched(ABC):
    """`refresh` runs in a thread of its own, `describe` and `point` in the watcher's thread.
    Subclasses guard shared attributes by `lock`."""

    least_s = 0.0

    late_s = 3.0
    """The state is `late` if a refresh has lasted longer than this."""

    def __init__(self, source_id: str, history: History) -> None:
        self.id = source_id
        self.history = history
        self.lock = threading.Lock()
        self.is_done = threading.Event()  # set while no refresh is under way
        self.is_done.set()
        self.problem = ""
        self.answered_s = 0.0
        """The monotonic time of the last answer; 0: never."""
        self._requested_s = 0.0
        self._wanted = threading.Event()
        self._is_ended = False
        # A daemon thread, so that a hanging system call does not keep the program from ending
        self._thread = threading.Thread(target=self._run, name=f"watched {source_id}", daemon=True)
        self._thread.start()

    @abstractmethod
    def refresh(self) -> None:
        """Raises DieselError, OSError."""

    @abstractmethod
    def describe(self) -> Described:
        """Returns the newest facts, for the page."""

    @abstractmethod
    def point(self) -> Mapping[str, float] | None:
        """Returns the history's figures since the last call; None if nothing is known."""

    def refresh_soon(self) -> None:
        """Does nothing while a refresh is under way, or if one began less than `least_s` ago."""
        now_s = time.monotonic()
        if self.is_done.is_set() and now_s >= self._requested_s + self.least_s:
            self._requested_s = now_s
            self.is_done.clear()
            self._wanted.set()

    def end(self) -> None:
        self._is_ended = True
        self._wanted.set()

    @property
    def state(self) -> str:
        """`new` (no answer yet), `live`, `late` (a refresh takes long) or `lost` (it
        failed)."""
        if self.problem:
            return "lost"
        if not self.is_done.is_set() and time.monotonic() > self._requested_s + self.late_s:
            return "late"
        return "live" if self.answered_s else "new"

    def standing(self) -> Described:
        """Returns the keys that each kind has on the page. `age_s` is None if there was no
        answer."""
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
            except Exception as error:  # the dashboard goes on with the others
                log.exception("a bug in refreshing %s", self.id)
                problem = f"unexpected {type(error).__name__}"
            else:
                self.answered_s = time.monotonic()
            self.problem = problem
            self.is_done.set()
