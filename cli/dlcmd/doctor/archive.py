"""The contents of the archive of `dlcmd doctor --bundle`, and its bytes.

Every member goes through one `Redactor`, which removes secrets. Only listed environment variables
are packed; command lines of processes are never read, nor the user's files except our logs.
"""

import io
import json
import os
import platform
import re
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import diesel_fs
from diesel_fs.errors import DieselError
from diesel_fs.settings import Settings, config_file, user_folders
from diesel_fs.system.available_memory import CGROUPS
from diesel_fs.urls import parse_url, shown_url

from .checks import MountFacts
from .findings import Finding, counts
from .redaction import Redactor

LOG_TAIL_BYTES = 256 << 10

LOGS_MAX = 20

SHOWN_VARIABLES = (
    *("DIESEL_URL", "DIESEL_USER", "DIESEL_REDIS_USER", "DIESEL_REDIS_PASSWORD_FILE"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"),
    *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE"),
    *("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ENDPOINT", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
    *("HOME", "TMPDIR", "LANG", "LC_ALL", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
)

SECRET_VARIABLES = (
    *("DIESEL_KEY", "DIESEL_TASK_KEY", "DIESEL_REDIS_PASSWORD", "DIESEL_REDIS_SENTINEL_PASSWORD"),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    *("GOOGLE_APPLICATION_CREDENTIALS", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN"),
)
"""The archive records only whether these are set."""

_CGROUP_FILES = (
    *("memory.max", "memory.high", "memory.current", "memory.events", "memory.swap.max"),
    *("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.failcnt", "cpu.max", "pids.max"),
    *("pids.current", "cpu.cfs_quota_us", "cpu.cfs_period_us"),
)
_FILE_BYTES_MAX = 64 << 10
_REQUIREMENT = re.compile(r"[A-Za-z0-9._-]+")


class ArchiveMember(NamedTuple):
    name: str
    content: bytes


def members(
    settings: Settings | None,
    findings: Sequence[Finding],
    mounts: Sequence[MountFacts],
    logs: Sequence[Path],
    redactor: Redactor,
) -> list[ArchiveMember]:
    """`logs` are packed besides those in the user's state folder."""
    values: dict[str, object] = {
        "versions.json": _versions(),
        "settings.json": _settings(settings),
        "doctor.json": {
            "counts": counts(findings),
            "findings": [each.described() for each in findings],
        },
    }
    for number, facts in enumerate(mounts):
        values[f"mounts/{number}.json"] = {
            "path": facts.path, "source": facts.source, "state": facts.state, "stats": facts.stats,
        }  # fmt: skip
    texts = {
        name: json.dumps(redactor.value(value), indent=2, default=str) + "\n"
        for name, value in values.items()
    }
    texts |= {
        "machine/limits.txt": _file_text(Path("/proc/self/limits")),
        "machine/cgroup.txt": "\n".join(_cgroup_lines()) + "\n",
        "machine/memory.txt": _file_text(Path("/proc/meminfo")),
        "machine/mounts.txt": "".join(_our_mount_lines()),
    }
    found = [(f"logs/{path.name}", path) for path in _state_logs()]
    found += [(f"logs/named-{number}-{path.name}", path) for number, path in enumerate(logs)]
    for name, path in found:
        with suppress(OSError):
            texts[name] = _tail(path)
    return [
        ArchiveMember(
            redactor.text(name),
            (text if name in values else redactor.text(text)).encode("utf-8", "replace"),
        )
        for name, text in texts.items()
    ]


def packed(files: Sequence[ArchiveMember]) -> bytes:
    """The tar.gz names no user of this machine."""
    buffer, now_s = io.BytesIO(), int(time.time())
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for member in files:
            info = tarfile.TarInfo(f"diesel-bundle/{member.name}")
            info.size, info.mtime, info.mode = len(member.content), now_s, 0o600
            archive.addfile(info, io.BytesIO(member.content))
    return buffer.getvalue()


def _versions() -> dict[str, object]:
    packages: dict[str, str] = {}
    with suppress(metadata.PackageNotFoundError):
        for line in metadata.requires("diesel-fs") or ():
            if match := _REQUIREMENT.match(line):
                with suppress(metadata.PackageNotFoundError):
                    packages[match.group()] = metadata.version(match.group())
    system = ""
    with suppress(OSError):
        system = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    return {
        "diesel_fs": diesel_fs.__version__,
        "python": platform.python_version(),
        "linux": platform.release(),
        "machine": platform.machine(),
        "system": system,
        "processors": os.cpu_count(),
        "packages": dict(sorted(packages.items())),
    }


def _settings(settings: Settings | None) -> dict[str, object]:
    variables = {
        name: shown_url(os.environ[name]) for name in SHOWN_VARIABLES if name in os.environ
    }
    described: dict[str, object] = {
        "environment": variables,
        "variables_with_secrets_that_are_set": [
            name for name in SECRET_VARIABLES if os.environ.get(name)
        ],
    }
    with suppress(DieselError):
        described["configuration_file"] = str(config_file())
        described["configuration_file_exists"] = config_file().exists()
        described["folders"] = {name: str(path) for name, path in user_folders().items()}
    if settings is not None:
        described["user"], described["key_file"] = settings.user, settings.key_file
        with suppress(DieselError):
            described["repository"] = str(parse_url(settings.repository_url))
    return described


def _cgroup_lines() -> Iterator[str]:
    """Limits of the groups above hold for this process, too."""
    listed = _file_text(Path("/proc/self/cgroup"))
    yield from listed.splitlines()
    for line in listed.splitlines():
        _, controllers, group = line.split(":", 2)
        kinds = [each for each in controllers.split(",") if each in ("memory", "cpu", "pids")]
        for top in [CGROUPS / kind for kind in kinds] if controllers else [CGROUPS]:
            folder = top / group.lstrip("/")
            for each in (folder, *folder.parents):
                if each.is_relative_to(top):
                    for name in _CGROUP_FILES:
                        with suppress(OSError):
                            value = " ".join((each / name).read_text().split())
                            yield f"{each / name}: {value}"


def _our_mount_lines() -> Iterator[str]:
    """EROFS mounts may be parts of a dataset mount."""
    for line in _file_text(Path("/proc/self/mountinfo")).splitlines(keepends=True):
        if " - fuse.diesel " in line or " - erofs " in line:
            yield line


def _file_text(path: Path) -> str:
    with suppress(OSError), path.open("rb") as file:
        return file.read(_FILE_BYTES_MAX).decode(errors="replace")
    return ""


def _state_logs() -> list[Path]:
    found: list[tuple[int, Path]] = []
    with suppress(OSError, DieselError):
        for path in user_folders()["state"].glob("*.log"):
            if path.is_file() and not path.is_symlink():
                found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)[:LOGS_MAX]]


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LOG_TAIL_BYTES))
        content = file.read(LOG_TAIL_BYTES)
    if size > LOG_TAIL_BYTES:
        content = content[content.find(b"\n") + 1 :]
    return content.decode(errors="replace")
