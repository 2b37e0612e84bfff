"""The last hour of some figures, in memory of a fixed size. Not safe for concurrent use."""

from array import array
from collections.abc import Mapping, Sequence

EVERY_S = 5.0

POINTS = 720


class History:
    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = {name: array("f", bytes(4 * POINTS)) for name in columns}
        self._times = array("d", bytes(8 * POINTS))
        self._count = 0

    def add(self, time_s: float, figures: Mapping[str, float]) -> None:
        """`time_s` is in seconds since 1970. A column that `figures` lacks gets 0. Points with a
        later time are forgotten: the clock was set back."""
        if self._count and time_s < self._times[(self._count - 1) % POINTS]:
            self._keep([at for at in self._places() if self._times[at] < time_s])
        at = self._count % POINTS
        self._times[at] = round(time_s, 1)
        for name, values in self._columns.items():
            values[at] = figures.get(name, 0.0)
        self._count += 1

    def since(self, time_s: float) -> dict[str, list[float]]:
        """Returns the points after `time_s`, oldest first: the values of each column, and of
        `time`."""
        places = [at for at in self._places() if self._times[at] > time_s]
        found = {"time": [self._times[at] for at in places]}
        for name, values in self._columns.items():
            found[name] = [float(f"{values[at]:.4g}") for at in places]
        return found

    def _places(self) -> list[int]:
        return [at % POINTS for at in range(max(self._count - POINTS, 0), self._count)]

    def _keep(self, places: Sequence[int]) -> None:
        for values in (self._times, *self._columns.values()):
            for at, value in enumerate([values[place] for place in places]):
                values[at] = value
        self._count = len(places)
