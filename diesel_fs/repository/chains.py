"""In which form a version is published, and which other versions it builds on (FORMAT.md,
section 8). No I/O.

A version has one or more **forms**: its snapshot, and deltas from earlier versions. The **chain**
of a version are the forms that a reader needs: a snapshot and the deltas above it.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..errors import CorruptError
from ..format.object_names import VersionForm
from ..format.snapshot.delta import DELTAS_MAX

_SNAPSHOT_SHARE = 4
"""The deltas of a chain have at most this part (one in 4) of its snapshot's bytes."""

_SNAPSHOT_BYTES_MIN = 1 << 16
"""A smaller snapshot is written again: reading one more object costs more than its bytes."""

_GEOMETRIC = 2
"""A delta is merged with the one below unless that is this much larger."""


class Published(NamedTuple):
    """An object that holds a form of a version; `at_us` is when it was written, in us since
    1970."""

    form: VersionForm
    name: str
    bytes: int
    at_us: int


class PublishedForms:
    """The forms of a dataset's versions, from a listing of the store."""

    def __init__(self, objects: Iterable[Published]) -> None:
        self._of_version: defaultdict[int, list[Published]] = defaultdict(list)
        for each in sorted(objects):
            self._of_version[each.form.version].append(each)

    @property
    def versions(self) -> Sequence[int]:
        """Ascending."""
        return [*self._of_version]

    def forms(self, version: int) -> Sequence[Published]:
        """The snapshot comes first."""
        return self._of_version.get(version, ())

    def published_us(self, version: int) -> int:
        """The later of the version's own time and that of its first object. (The next put
        publishes a killed put's commits; until then readers use the version before.)"""
        return max(version, min(each.at_us for each in self._of_version[version]))

    @property
    def published(self) -> dict[int, int]:
        """The versions, ascending, and when each was published, in us since 1970."""
        return {version: self.published_us(version) for version in self.versions}

    def chain(self, version: int) -> Sequence[Published]:
        """From the version's own form down to a snapshot. Raises CorruptError, which names the
        version that is missing."""
        chain: list[Published] = []
        at = version
        while not chain or chain[-1].form.base:
            forms = self.forms(at)
            if not forms:
                raise CorruptError(
                    f"version {version} cannot be read: version {at}, on which it builds, is"
                    " missing"
                )
            chain.append(forms[0] if not forms[0].form.base else forms[-1])
            at = chain[-1].form.base
        return chain

    def needed(self, versions: Iterable[int]) -> frozenset[int]:
        """These versions, and all on which any of their deltas builds; a version with a snapshot
        builds on nothing. A missing link is left out."""
        needed: set[int] = set()
        left = [*versions]
        while left:
            version = left.pop()
            forms = self.forms(version)
            if version not in needed and forms:
                needed.add(version)
                if forms[0].form.base:
                    left += [each.form.base for each in forms]
        return frozenset(needed)


def is_worth_deltas(snapshot_bytes: int) -> bool:
    return snapshot_bytes >= _SNAPSHOT_BYTES_MIN


def choose_base(chain: Sequence[Published], delta_bytes: int) -> int | None:
    """The position in `chain` of the form on which the next version's delta builds, if the changes
    since `chain[0]` take `delta_bytes`; None if the next version needs a snapshot."""
    if not is_worth_deltas(chain[-1].bytes):
        return None
    at = 0
    while at < len(chain) - 1 and (
        chain[at].bytes < _GEOMETRIC * delta_bytes or len(chain) - at > DELTAS_MAX
    ):
        delta_bytes += chain[at].bytes
        at += 1
    total = delta_bytes + sum(each.bytes for each in chain[at:-1])
    return at if total * _SNAPSHOT_SHARE <= chain[-1].bytes else None
