"""Draws a progress bar with rich. Imported only if there is a terminal."""

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from .output import bytes_text


class Bar:
    """This has no thread, since `put` forks."""

    def __init__(self, title: str, unit: str) -> None:
        self._unit = unit
        self._rich = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
        )
        self._task = self._rich.add_task(title, total=None, rate="")
        self._rich.start()

    def draw(self, done: int, total: int, content_bytes: int | None = None) -> None:
        task = self._rich.tasks[0]
        passed_s = max(task.elapsed or 0.0, 0.001)
        rate = f"{done:,} {self._unit}, {done / passed_s:,.0f}/s"
        if content_bytes is not None:
            rate += f", {bytes_text(content_bytes / passed_s)}/s"
        self._rich.update(self._task, completed=done, total=total or None, rate=rate)
        self._rich.refresh()

    def close(self) -> None:
        self._rich.stop()
