"""Reads the attributes of a volume, and computes the key by which equal volumes share a mount.
Pure.

Attributes and secrets come from tenants. Each checked attribute becomes one argument `--name=value`
of `dlcmd mount`, or a variable of its environment, as each secret does. So no value can become an
option, and none reaches a shell. `VOLUMES.md` lists all attributes and secrets.
"""

import hashlib
import hmac
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from diesel_fs.arguments import number
from diesel_fs.errors import UsageError
from diesel_fs.names import DATASET_NAME, check_dataset_name
from diesel_fs.peers.members.options import option_specs
from diesel_fs.settings import parse_size
from diesel_fs.urls import parse_url

from ..names import ATTRIBUTES, POD_INFO, POD_NAME, POD_NAMESPACE, SECRETS
from ..reports import is_namespace

MOUNT_FLAGS = frozenset({"ro", "noatime", "nosuid", "nodev"})
"""All of these hold for every volume anyway."""

PART_CHARS = 16
KEY_CHARS = 2 * PART_CHARS
"""A volume's key has `PART_CHARS` hexadecimal digits of a hash of the attributes, then as many of a
hash of the secrets."""
SECRET_BYTES_MAX = 16 << 10
SHOWN_SECRET_CHARS = 6
"""Shorter secrets are not hidden in messages: hiding a user called `pets` would also hide that
dataset."""

_META_SCHEMES = ("redis", "rediss", "redis+sentinel", "redis+cluster")
_DURATION = re.compile(r"0|\d{1,6}[smhdw]", re.ASCII)
_DECIMAL = re.compile(r"\d{1,9}(\.\d{1,9})?", re.ASCII)
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
_VERSION = re.compile(r"[1-9]\d{0,18}", re.ASCII)
_USER = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_REGION = re.compile(r"[A-Za-z0-9-]{1,64}")
_UMASK = re.compile("[0-7]{1,4}")
_TASK = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_POD_RANK = re.compile(r"pod(?:\+(\d{1,6}))?", re.ASCII)
# `train-worker-3` and `train-3`; a Job adds five characters: `train-3-x7k2p`
_ORDINAL = re.compile(r".*-(\d{1,6})(?:-[a-z0-9]{5})?", re.ASCII)

_CHOICES = {
    "session": ("auto", "native", "kernel", "pyfuse3"),
    "policy": ("on-demand", "oneshot"),
    "evict": ("plan", "importance", "lrfu", "lru", "lfu", "none"),
    "cacheLayout": ("auto", "chunks", "order"),
}
_FLAGS = ("follow", "peerTls", "peersThroughMaster")
_NEEDS = {
    **dict.fromkeys(("rank", "world", "peerTls", "peersThroughMaster"), "task"),
    **dict.fromkeys(("cacheSize", "cacheLayout", "orderLogBelow", "coolDown"), "cacheDir"),
}


@dataclass(frozen=True, slots=True)
class VolumeLimits:
    url: str = ""
    """The repository of volumes that name none."""
    file_roots: tuple[str, ...] = ()
    """Below these folders, a volume may name a repository by `file://`."""
    cache_root: str = ""
    """Below this folder, volumes may have cache folders; "": they may have none."""
    memory_bytes_max: int = 4 << 30
    """A volume may request at most this memory for contents; it is also the default."""
    cache_bytes_max: int = 0
    """0: no limit."""


@dataclass(frozen=True, slots=True)
class Volume:
    """A volume's checked attributes and secrets."""

    dataset: str
    version: int
    """0: the current version at the time of publishing."""
    follow: bool
    options: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables with the repository and the user, but no secrets."""
    namespace: str
    """Empty if kubelet names none."""
    memory_bytes: int
    cache_dir: str = ""
    """The path of the cache folder; empty if there is none."""
    file_folder: str = ""
    """The folder of a `file://` repository on the node; empty for others."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Values by the names of `dlcmd`'s variables."""

    @property
    def named(self) -> str:
        return f"{self.dataset}@{self.version}" if self.version else self.dataset

    @property
    def may_go_stale(self) -> bool:
        return not self.version and not self.follow

    def key(self, node_key: bytes) -> str:
        """Equal volumes have the same key. Nobody without `node_key` can compute it."""
        named = [
            self.namespace, self.named, self.follow, self.options,
            sorted(self.environment.items()),
        ]  # fmt: skip
        parts = ["named", named], ["secrets", sorted(self.secrets.items())]
        digests = (hmac.new(node_key, json.dumps(each).encode(), hashlib.sha256) for each in parts)
        return "".join(each.hexdigest()[:PART_CHARS] for each in digests)

    def without_secrets(self, text: str) -> str:
        """A text for messages, with `***` in place of this volume's secrets."""
        for value in sorted(self.secrets.values(), key=len, reverse=True):
            for each in (value, *value.split()):
                if len(each) >= SHOWN_SECRET_CHARS:
                    text = text.replace(each, "***")
        return text


def name_the_same(key: str, other: str) -> bool:
    """Whether two keys are of volumes with the same attributes. Secrets do not count."""
    return key[:PART_CHARS] == other[:PART_CHARS]


def parse_volume(
    attributes: Mapping[str, str], secrets: Mapping[str, str], limits: VolumeLimits
) -> Volume:
    """Raises UsageError, whose message names the attribute and repeats no secret."""
    given = {name: text for name, text in attributes.items() if not name.startswith(POD_INFO)}
    for name in sorted(given.keys() - set(ATTRIBUTES)):
        raise UsageError(
            f"unknown volume attribute {name!r}", advice=f"known: {', '.join(ATTRIBUTES)}"
        )
    for name, needed in _NEEDS.items():
        if name in given and needed not in given:
            raise UsageError(f"volume attribute {name} needs {needed}")
    if "dataset" not in given:
        raise UsageError("the volume names no dataset", advice="add the attribute dataset")
    namespace = attributes.get(POD_NAMESPACE, "")
    if namespace and not is_namespace(namespace):  # it becomes a part of paths
        raise UsageError(f"bad namespace {namespace[:80]!r}")
    follow = _flag(given, "follow")
    if follow and "version" in given:
        raise UsageError(
            "volume attributes version and follow exclude each other",
            advice="a named version never changes: leave out one of the two",
        )
    options, memory_bytes = _options(given, attributes, limits)
    cache_dir = _cache_dir(given, namespace, limits)
    if cache_dir:
        options += (f"--cache-dir={cache_dir}", *_cache_size(given, limits))
    url = given.get("url") or limits.url
    variables = {"DIESEL_URL": url}
    file_folder = _checked_url(url, limits)
    for name, pattern, variable in (
        ("user", _USER, "DIESEL_USER"),
        ("region", _REGION, "AWS_REGION"),
    ):
        if name in given:
            variables[variable] = _matching(given, name, pattern)
    if "endpoint" in given:
        variables["AWS_ENDPOINT_URL"] = _endpoint(given["endpoint"])
    return Volume(
        dataset=check_dataset_name(given["dataset"]),
        version=int(_matching(given, "version", _VERSION)) if "version" in given else 0,
        follow=follow,
        options=options,
        environment=variables,
        namespace=namespace,
        memory_bytes=memory_bytes,
        cache_dir=cache_dir,
        file_folder=file_folder,
        secrets=_parsed_secrets(secrets),
    )


def _options(
    given: Mapping[str, str], attributes: Mapping[str, str], limits: VolumeLimits
) -> tuple[tuple[str, ...], int]:
    options = []

    def add(name: str, option: str, check: Callable[[str], str]) -> None:
        if name in given:
            options.append(f"--{option}={check(name)}")

    def digits(name: str) -> str:
        return _matching(given, name, _NUMBER)

    def choice(name: str) -> str:
        if given[name] not in _CHOICES[name]:
            raise _bad(given, name, f"one of {', '.join(_CHOICES[name])}")
        return given[name]

    session = choice("session") if "session" in given else "auto"
    if _flag(given, "follow"):
        # A bind keeps the tree of a native mount that switches to another version
        if session == "native":
            raise UsageError(
                "volume attributes session: native and follow exclude each other",
                advice="leave out session",
            )
        options.append("--follow")
        session = "kernel" if session == "auto" else session
    options.append(f"--session={session}")
    for name in ("policy", "evict"):
        add(name, name, choice)
    add("cacheLayout", "cache-layout", choice)
    if "orderLogBelow" in given:
        if given.get("cacheLayout", "auto") != "auto":
            raise UsageError("volume attribute orderLogBelow needs cacheLayout: auto")
        options.append(f"--order-log-below={_size(given, 'orderLogBelow', 0)}")
    add("coolDown", "cool-down", lambda name: _matching(given, name, _DURATION))
    for name, option in (("lrfuP", "lrfu-p"), ("lrfuStep", "lrfu-step")):
        if name in given and given.get("evict") != "lrfu":
            raise UsageError(f"volume attribute {name} needs evict: lrfu")
        add(name, option, lambda name: _decimal(given, name))
    for name, option in (("seed", "seed"), ("groupSize", "group-size"), ("uid", "uid")):
        add(name, option, digits)
    add("gid", "gid", digits)
    add("umask", "umask", lambda name: _matching(given, name, _UMASK))
    add("task", "task", lambda name: _matching(given, name, _TASK))
    add("rank", "rank", lambda name: _rank(given[name], attributes.get(POD_NAME, "")))
    add("world", "world", digits)
    for name, option in (
        ("peerTls", "peer-tls"),
        ("peersThroughMaster", "peers-through-master"),
    ):
        if _flag(given, name):
            options.append(f"--{option}")
    memory_bytes = _size(given, "memory", limits.memory_bytes_max) or limits.memory_bytes_max
    return (*options, f"--memory={memory_bytes}"), memory_bytes


def _flag(given: Mapping[str, str], name: str) -> bool:
    if given.get(name, "false") not in ("true", "false"):
        raise _bad(given, name, "true or false")
    return given.get(name) == "true"


def _matching(given: Mapping[str, str], name: str, pattern: "re.Pattern[str]") -> str:
    if not pattern.fullmatch(given[name]):
        raise _bad(given, name, f"of the form {pattern.pattern}")
    return given[name]


def _bad(given: Mapping[str, str], name: str, meant: str) -> UsageError:
    return UsageError(f"bad volume attribute {name}: {given[name][:80]!r}", advice=f"it is {meant}")


def _size(given: Mapping[str, str], name: str, most: int) -> int:
    if name not in given:
        return 0
    try:
        found = parse_size(given[name])
    except UsageError as error:
        raise _bad(given, name, "a size: 4096, 64K, 4M or 1G") from error
    if found == 0 or (most and found > most):
        raise _bad(given, name, f"at most {most} bytes on this node" if found else "more than 0")
    return found


def _decimal(given: Mapping[str, str], name: str) -> str:
    """A number in the bounds of the option of `dlcmd mount`."""
    spec = option_specs()[{"lrfuP": "lrfu_p", "lrfuStep": "lrfu_step"}[name]]
    text = _matching(given, name, _DECIMAL)
    try:
        number(name, float(text), spec.low, spec.high)
    except UsageError as error:
        raise UsageError(f"bad volume attribute {error.message}") from error
    return text


def _rank(text: str, pod: str) -> str:
    """The texts `pod` and `pod+N` take the number in the pod's name."""
    match = _POD_RANK.fullmatch(text)
    if match is None:
        return _matching({"rank": text}, "rank", _NUMBER)
    ordinal = _ORDINAL.fullmatch(pod)
    if ordinal is None:
        raise UsageError(
            f"volume attribute rank: {text} needs a number in the pod's name, and there is none in"
            f" {pod!r}",
            advice="pods of a StatefulSet, an indexed Job or a PyTorchJob have one",
        )
    return str(int(ordinal[1]) + int(match[1] or 0))


def _cache_dir(given: Mapping[str, str], namespace: str, limits: VolumeLimits) -> str:
    if "cacheDir" not in given:
        if given.get("evict") == "lrfu":
            raise UsageError(
                "volume attribute evict: lrfu decides between the datasets of a folder for caches",
                advice="give cacheDir, too",
            )
        return ""
    if not limits.cache_root:
        raise UsageError(
            "volume attribute cacheDir: this node has no folder for caches",
            advice="leave it out, or start diesel-csi with --cache-root",
        )
    name = _matching(given, "cacheDir", DATASET_NAME)
    return f"{limits.cache_root}/{namespace or '-'}/{name}"


def _cache_size(given: Mapping[str, str], limits: VolumeLimits) -> tuple[str, ...]:
    size = _size(given, "cacheSize", limits.cache_bytes_max) or limits.cache_bytes_max
    return (f"--cache-size={size}",) if size else ()


def _endpoint(text: str) -> str:
    try:
        parts = urlsplit(text)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_good = False
    if not is_good or "@" in text:
        raise UsageError(
            "bad volume attribute endpoint", advice="write it as https://host:port, without a user"
        )
    return text


def _checked_url(url: str, limits: VolumeLimits) -> str:
    """Returns the folder of a `file://` repository, else "". Raises UsageError."""
    if not url:
        raise UsageError(
            "the volume names no repository, and this node has no default",
            advice="add the attribute url, as diesel+tls://host:9300",
        )
    if "@" in url:
        raise UsageError(
            "volume attribute url has a user or a password",
            advice="put them into the Secret that nodePublishSecretRef names",
        )
    parsed = parse_url(url)
    folder = str(parsed.path) if parsed.scheme == "file" else ""
    if url == limits.url:  # the administrator's choice, which has no restrictions
        return folder
    if parsed.meta:
        scheme, _, rest = parsed.meta.partition("://")
        if scheme not in _META_SCHEMES or "?" in rest:
            raise UsageError(
                "volume attribute url: ?meta= names a file or socket of the node",
                advice=f"name a Redis by {', '.join(_META_SCHEMES)}, without parameters",
            )
    if folder:
        path = PurePosixPath(folder)
        if ".." in path.parts or not any(map(path.is_relative_to, limits.file_roots)):
            raise UsageError(
                f"volume attribute url: volumes may not name the folder {folder} of the node",
                advice="start diesel-csi with a --file-root above it",
            )
    return folder


def _parsed_secrets(secrets: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for name, value in secrets.items():
        if name not in SECRETS:
            raise UsageError(
                f"unknown key {name[:64]!r} in the Secret of the volume",
                advice=f"known: {', '.join(SECRETS)}",
            )
        if "\0" in value or len(value.encode()) > SECRET_BYTES_MAX:
            raise UsageError(f"the value of {name} in the Secret is too long, or no text")
        if value.strip():
            found[SECRETS[name]] = value.strip()
    return found


def check_mount_flags(flags: "list[str]") -> None:
    """Raises UsageError for a mount option that a volume may not name."""
    for flag in flags:
        if flag not in MOUNT_FLAGS:
            raise UsageError(
                f"mount option {flag[:80]!r}: a volume takes attributes in place of mount options",
                advice=f"leave it out; {', '.join(sorted(MOUNT_FLAGS))} always hold",
            )
