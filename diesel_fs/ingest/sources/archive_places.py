"""Where archives lie: in files of this machine, and behind http and https addresses.

An address may end in `#sha256=` and 64 hex digits, which the archive must have. What a server
calls an archive's bytes is its ETag, unless that is a weak one, else the time of the last change.
Redirections are followed, but never from https to http. A server that sends parts of a file is
asked for several at once; another sends the whole, which then cannot be resumed.
"""

import email.utils
import os
import re
import urllib.request
from functools import partial
from urllib.parse import urljoin, urlsplit, urlunsplit

import urllib3

from ...errors import (
    ConfigError,
    ConflictError,
    NotFoundError,
    ObjectStoreRefused,
    PermissionDenied,
    UsageError,
)
from ...names import shown
from ...storage.objects.retry import AttemptFailed, RetryClock, RetryLoop, RetryPolicy
from .archive_file import (
    ArchiveFile,
    FetchedArchiveFile,
    LocalArchiveFile,
    StreamedArchiveFile,
)
from .archives import ArchiveState

_SHA256 = re.compile("sha256=([0-9a-fA-F]{64})")
_REDIRECTS_MAX = 5
_CONNECT_S, _READ_S = 10.0, 30.0  # a server that sends nothing for so long is asked again
_TAG_MAX = 1024  # of characters
_AHEAD = 8  # pieces of one archive that are fetched at once
_BUSY = (408, 425, 429, 500, 502, 503, 504)
_POLICY = RetryPolicy()
_SECOND_NS = 1_000_000_000


def split_sha256(address: str) -> tuple[str, bytes]:
    """An address without its fragment, and the SHA-256 that the fragment says. Raises UsageError
    for another fragment."""
    plain, has_fragment, fragment = address.partition("#")
    if not has_fragment:
        return address, b""
    said = _SHA256.fullmatch(fragment)
    if said is None:
        raise UsageError(
            f"bad fragment in {plain}#{fragment}", advice="it is #sha256= and 64 hex digits"
        )
    return plain, bytes.fromhex(said[1])


class LocalArchive:
    """An archive in a file of this machine."""

    is_local = True
    sha256 = b""

    def __init__(self, path: str) -> None:
        self.name = path
        self.address = os.path.abspath(path)

    def look(self) -> ArchiveState:
        """Its state. Raises NotFoundError, PermissionDenied."""
        try:
            found = os.stat(self.name)
        except FileNotFoundError as error:
            raise NotFoundError(f"there is no file {shown(os.fsencode(self.name))}") from error
        except OSError as error:
            raise PermissionDenied(f"cannot read {self.name}: {error.strerror}") from error
        if not os.path.isfile(self.name):
            raise UsageError(f"{self.name} is no file", advice="name the archives in a folder: F/*")
        return ArchiveState(f"mtime {found.st_mtime_ns}", found.st_size, found.st_mtime_ns)

    def open(self, state: ArchiveState) -> ArchiveFile:
        """Its bytes. Raises PermissionDenied, and OSError where it has changed."""
        try:
            file = LocalArchiveFile(self.name)
        except OSError as error:
            raise PermissionDenied(f"cannot read {self.name}: {error.strerror}") from error
        if file.size != state.size:
            file.close()
            raise OSError("it changed while it was being read")
        return file


class HttpArchive:
    """An archive behind an http or https address."""

    is_local = False

    def __init__(self, address: str) -> None:
        """Sends no request yet. Raises UsageError, ConfigError."""
        self.address, self.sha256 = split_sha256(address)
        parts = urlsplit(self.address)
        self.name = urlunsplit(parts._replace(query="", fragment=""))
        if "@" in parts.netloc or not parts.hostname:
            raise UsageError(
                f"bad address {parts.scheme}://...: it needs a host, and holds no password",
                advice="every user of this machine could read a password in a command",
            )
        self._pool = _pool(parts.scheme, parts.hostname)
        self._place = self.address  # where redirections led
        self._sends_parts = False
        self._etag = ""

    def look(self) -> ArchiveState:
        """Its state, by a request for its first byte. Raises NotFoundError, PermissionDenied,
        ObjectStoreError."""
        return self._retrying(0).call(self._look)

    def open(self, state: ArchiveState) -> ArchiveFile:
        """Its bytes. Raises as `look`; reading raises OSError."""
        if self._sends_parts:
            return FetchedArchiveFile(state.size, self._read, _AHEAD)
        answer = self._retrying(0).call(lambda: self._get(self.address, {}))
        read = partial(_read_stream, answer)
        return StreamedArchiveFile(state.size or None, read, answer.close)

    def _look(self) -> ArchiveState:
        answer = self._get(self.address, {"Range": "bytes=0-0"})
        try:
            headers = answer.headers
            etag = headers.get("ETag", "")
            self._etag = "" if etag.startswith("W/") else etag
            self._sends_parts = answer.status == 206
            if self._sends_parts or answer.status == 416:
                size = headers.get("Content-Range", "").rpartition("/")[2]
            else:
                size = headers.get("Content-Length", "")
            changed = headers.get("Last-Modified", "")
        finally:
            answer.close()
        if not size.isdigit():
            if self._sends_parts:
                raise ObjectStoreRefused(f"{self.name}: the server does not say how long it is")
            size = "0"  # not known
        modified = email.utils.parsedate_tz(changed) if changed else None
        modified_ns = email.utils.mktime_tz(modified) * _SECOND_NS if modified else 0
        tag = (self._etag or (f"modified {changed}" if changed else ""))[:_TAG_MAX]
        return ArchiveState(tag if int(size) else "", int(size), modified_ns)

    def _read(self, start: int, size: int) -> bytes:
        return self._retrying(size).call(lambda: self._read_once(start, size))

    def _read_once(self, start: int, size: int) -> bytes:
        headers = {"Range": f"bytes={start}-{start + size - 1}"}
        if self._etag:
            headers["If-Match"] = self._etag
        answer = self._get(self._place, headers)
        try:
            if answer.status != 206 or self._etag not in ("", answer.headers.get("ETag", "")):
                raise ConflictError(f"{self.name} changed while it was being read")
            data = answer.read(size)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise AttemptFailed(f"{self.name}: {_reason(error)}") from error
        finally:
            answer.close()
        if len(data) != size:
            raise AttemptFailed(f"{self.name}: the server sent {len(data)} of {size} bytes")
        return data

    def _get(self, address: str, headers: dict[str, str]) -> urllib3.BaseHTTPResponse:
        """The answer to a request, after redirections. Raises DieselError for an error of the
        server."""
        for _ in range(_REDIRECTS_MAX + 1):
            try:
                answer = self._pool.request(
                    "GET", address, headers={"Accept-Encoding": "identity", **headers},
                    preload_content=False, redirect=False, retries=False, decode_content=False,
                )  # fmt: skip
            except (urllib3.exceptions.HTTPError, OSError) as error:
                raise AttemptFailed(f"{self.name}: {_reason(error)}") from error
            if answer.status not in (301, 302, 303, 307, 308):
                break
            target = urljoin(address, answer.headers.get("Location", ""))
            answer.close()
            if urlsplit(target).scheme != "https" and urlsplit(address).scheme == "https":
                raise ObjectStoreRefused(f"{self.name}: the server redirects from https to http")
            address = target
        else:
            raise ObjectStoreRefused(f"{self.name}: more than {_REDIRECTS_MAX} redirections")
        self._place = address
        if answer.status in (200, 206, 416):
            return answer
        answer.close()
        said = f"{self.name}: the server answers {answer.status} {answer.reason or ''}".rstrip()
        match answer.status:
            case 404 | 410:
                raise NotFoundError(said)
            case 401 | 403:
                self._place = self.address  # an address that a redirection gave may have expired
                raise PermissionDenied(said)
            case 412:
                raise ConflictError(f"{self.name} changed while it was being read")
            case status if status in _BUSY:
                pause = answer.headers.get("Retry-After", "0")
                raise AttemptFailed(said, pause_s_min=float(pause) if pause.isdigit() else 0.0)
        raise ObjectStoreRefused(said)

    def _retrying(self, size: int) -> RetryLoop:
        return RetryLoop(
            _POLICY, RetryClock(), deadline_s=_POLICY.deadline_for(size), attempt_s=_CONNECT_S
        )


def _pool(scheme: str, host: str) -> urllib3.PoolManager:
    """Connections, through the proxy that the environment names, if any."""
    timeout = urllib3.Timeout(connect=_CONNECT_S, read=_READ_S)
    proxy = urllib.request.getproxies().get(scheme)
    if proxy is None or urllib.request.proxy_bypass(host):
        return urllib3.PoolManager(timeout=timeout, maxsize=_AHEAD)
    try:
        return urllib3.ProxyManager(proxy, timeout=timeout, maxsize=_AHEAD)
    except urllib3.exceptions.HTTPError as error:
        raise ConfigError(f"the environment names a bad proxy for {scheme}") from error


def _read_stream(answer: urllib3.BaseHTTPResponse, size: int) -> bytes:
    try:
        return answer.read(size)
    except urllib3.exceptions.HTTPError as error:
        raise OSError(_reason(error)) from error


def _reason(error: BaseException) -> str:
    """Why a request failed, without the address, which may hold a secret."""
    cause = error.__cause__ or error
    return str(getattr(cause, "strerror", None) or type(cause).__name__)
