"""An index of the reports of all nodes: which shares of datasets they hold. Pure."""

from collections.abc import Iterable
from uuid import UUID

from ..reports import Held, HeldDataset, NodeReport


class ReportedHoldings:
    """An instance is never changed."""

    def __init__(self, reports: Iterable[NodeReport] = (), now_s: float = 0.0) -> None:
        """Reports that are too old at `now_s` (seconds since 1970) are left out."""
        fresh = {each.node: each for each in reports if each.is_fresh(now_s)}
        self._complete = {node for node, each in fresh.items() if each.is_complete}
        self._held: dict[Held, dict[str, list[HeldDataset]]] = {}
        for node, report in fresh.items():
            for each in report.datasets:
                self._held.setdefault(each.key, {}).setdefault(node, []).append(each)

    def nodes(self, key: Held) -> set[str]:
        return set(self._held.get(key, ()))

    def find(self, node: str, key: Held, version: int) -> HeldDataset | None:
        """Returns None if the node's share is not known; a share of 0 if a complete report does not
        name the dataset."""
        entries = self._held.get(key, {}).get(node, [])
        if not entries and node in self._complete:
            return HeldDataset(*key, version)
        return next((each for each in entries if each.version == version), None)

    def changed_since(self, before: "ReportedHoldings") -> tuple[set[Held], set[str]]:
        """The datasets whose shares have changed, and the nodes whose reports have become complete
        or incomplete."""
        keys = self._held.keys() | before._held.keys()
        datasets = {key for key in keys if self._held.get(key) != before._held.get(key)}
        return datasets, self._complete ^ before._complete


def held_key(namespace: str, identity: str) -> Held | None:
    """A dataset's key in reports; None if `identity` (from a status) is none."""
    try:
        return namespace, UUID(identity)
    except ValueError:
        return None
