"""Reports of nodes: which share of each dataset a node holds. Pure.

The plugin of a node writes a report, one ConfigMap in the driver's namespace, and the operator
reads it. `csi/VOLUMES.md` defines each figure. Anybody who may write ConfigMaps in that namespace
can forge a report, so a reader checks all types and bounds, and takes a report whole or not at all.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from diesel_fs.errors import FormatError

from .names import LABEL_NODE, label_value

Json = dict[str, object]

REFRESH_S = 300.0
"""The pause between two reports without a change."""

AGE_S_MAX = 3 * REFRESH_S
"""An older report is not used: its plugin has probably ended. Nor is one from this far in the
future."""

NOTICEABLE = 5
"""A change of a share by this many percent of the dataset is reported before `REFRESH_S`."""

DATASETS_MAX = 1000
"""The most datasets in a report, which must fit a ConfigMap."""

REPORT_CHARS_MAX = 1 << 20

_TIME_MAX = 1 << 40
_VERSION_MAX = (1 << 63) - 1
_NAMESPACE = re.compile(r"-|[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_NODE = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)

Held = tuple[str, UUID]
"""A dataset in reports is named by the namespace of the pods that read it (`-`: unknown), and its
identity."""


@dataclass(frozen=True, slots=True)
class HeldDataset:
    """Shares are in percent of a version's stored bytes, rounded down."""

    namespace: str
    identity: UUID
    version: int
    """0: it is not known how much of which version is held."""
    share: int = 0
    disk: int = 0
    """This part of `share` stays when no pod reads the dataset."""
    is_used: bool = False
    """Whether pods read the dataset now."""

    @property
    def key(self) -> Held:
        return self.namespace, self.identity

    def joined(self, other: "HeldDataset") -> "HeldDataset":
        """Both places may hold the same parts, so of each share the larger counts, a lower
        bound."""
        return HeldDataset(
            self.namespace,
            self.identity,
            self.version,
            max(self.share, other.share),
            max(self.disk, other.disk),
            self.is_used or other.is_used,
        )


@dataclass(frozen=True, slots=True)
class NodeReport:
    node: str
    time_s: int
    """Seconds since 1970, by the node's clock."""
    is_complete: bool
    """Whether the report names all datasets that the node holds."""
    datasets: tuple[HeldDataset, ...] = ()

    def is_fresh(self, now_s: float) -> bool:
        return abs(now_s - self.time_s) <= AGE_S_MAX


def make_report(
    node: str, now_s: float, datasets: Iterable[HeldDataset], *, is_complete: bool
) -> NodeReport:
    """Beyond DATASETS_MAX datasets, the report has those with the largest shares, and is not
    complete."""
    found = sorted(datasets, key=lambda each: (-each.share, each.key, each.version))
    kept = sorted(found[:DATASETS_MAX], key=lambda each: (each.key, each.version))
    return NodeReport(node, int(now_s), is_complete and len(found) == len(kept), tuple(kept))


def differs_noticeably(before: NodeReport, after: NodeReport) -> bool:
    """Whether `after` is to be written although `before` is younger than REFRESH_S."""
    old, new = (
        {(each.key, each.version, each.is_used): each for each in report.datasets}
        for report in (before, after)
    )
    if before.is_complete != after.is_complete or old.keys() != new.keys():
        return True
    pairs = [(old[key], new[key]) for key in new]
    shares = [
        pair for a, b in pairs for pair in ((a.share, b.share), (a.disk, b.disk))
    ]  # fmt: skip
    return any(
        was != now and (abs(was - now) >= NOTICEABLE or now in (0, 100)) for was, now in shares
    )


def is_namespace(text: str) -> bool:
    return _NAMESPACE.fullmatch(text) is not None


def report_name(node: str) -> str:
    return f"diesel-node-{label_value(node)}"


def config_map(report: NodeReport, namespace: str, owner: Json | None) -> Json:
    """The cluster deletes the ConfigMap with `owner`, an owner reference."""
    content = {
        "node": report.node,
        "time": report.time_s,
        "complete": report.is_complete,
        "datasets": [
            {
                "namespace": each.namespace,
                "identity": str(each.identity),
                "version": each.version,
                "share": each.share,
                "disk": each.disk,
                "used": each.is_used,
            }
            for each in report.datasets
        ],
    }
    metadata: Json = {
        "name": report_name(report.node),
        "namespace": namespace,
        "labels": {
            "app.kubernetes.io/name": "diesel-node",
            LABEL_NODE: label_value(report.node),
        },
    }
    if owner is not None:
        metadata["ownerReferences"] = [owner]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "data": {"report": json.dumps(content, separators=(",", ":"))},
    }


def parse_config_map(raw: Mapping[str, object]) -> NodeReport:
    """Raises FormatError for a malformed report."""
    match raw:
        case {"metadata": {"name": str(name)}, "data": {"report": str(content)}}:
            pass
        case _:
            raise FormatError("a ConfigMap has no report")
    if len(content) > REPORT_CHARS_MAX:
        raise FormatError(f"the report in {name} is too long")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the report in {name} is no JSON") from error
    match value:
        case {
            "node": str(node),
            "time": int(time_s),
            "complete": bool(is_complete),
            "datasets": list(entries),
        } if _is_whole(time_s, 1, _TIME_MAX) and len(entries) <= DATASETS_MAX:
            if not _NODE.fullmatch(node) or name != report_name(node):
                raise FormatError(f"{name} is not the name of that node's report")
            return NodeReport(node, time_s, is_complete, _parsed(entries, name))
    raise FormatError(f"the report in {name} has other fields than a report")


def _parsed(entries: Sequence[object], name: str) -> tuple[HeldDataset, ...]:
    found = []
    for entry in entries:
        match entry:
            case {
                "namespace": str(namespace),
                "identity": str(identity),
                "version": int(version),
                "share": int(share),
                "disk": int(disk),
                "used": bool(is_used),
            } if (
                is_namespace(namespace)
                and _is_whole(version, 0, _VERSION_MAX)
                and _is_whole(share, 0, 100)
                and _is_whole(disk, 0, share)
            ):
                try:
                    parsed = UUID(identity)
                except ValueError:
                    break
                found.append(HeldDataset(namespace, parsed, version, share, disk, is_used))
            case _:
                break
    if len(found) < len(entries):
        raise FormatError(f"the report in {name} has a dataset with bad figures")
    return tuple(found)


def _is_whole(value: int, low: int, high: int) -> bool:
    """Excludes `bool`, which Python counts as an `int`."""
    return type(value) is int and low <= value <= high
