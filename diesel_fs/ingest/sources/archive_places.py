"""The places of archives: local files, and http and https addresses (`ingest/README.md` has the
rules).

The tag of an archive is the server's ETag; if that is missing or weak, the time of the last change.
If an answer has another ETag, time or length than the first one, the archive has changed, and
nothing more of it is taken. Redirections are followed, but never from https to http. If a server
sends ranges of bytes, several are requested at once; otherwise a broken transfer is not resumed.
"""

import email.utils
import os
import re
import urllib.request
from functools import partial
from typing import NamedTuple
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

import urllib3
import urllib3.util

from ...errors import (
    ConfigError,
    ConflictError,
    NotFoundError,
    ObjectStoreRefused,
    PermissionDenied,
    UsageError,
)
from ...names import shown
from ...storage.objects.retry import (
    AttemptFailed,
    LongPauses,
    RetryClock,
    RetryLoop,
    RetryPolicy,
    retry_after_s,
)
from .archive_file import (
    ArchiveFile,
    FetchedArchiveFile,
    LocalArchiveFile,
    StreamedArchiveFile,
)
from .archives import ArchiveState

_SHA256 = re.compile("sha256=([0-9a-fA-F]{64})")
_SIZE = re.compile("[0-9]{1,18}")
_REDIRECTS_MAX = 5
_CONNECT_S, _READ_S = 10.0, 30.0  # a server that sends nothing in time gets another request
_TAG_MAX = 1024  # of characters
_AHEAD = 8  # pieces that are fetched at once
_BUSY = (408, 425, 429, 500, 502, 503, 504)  # after these, the request is sent again
_POLICY = RetryPolicy()
_SECOND_NS = 1_000_000_000
_TIME_S_END = (1 << 63) // _SECOND_NS


def split_sha256(address: str) -> tuple[str, bytes]:
    """The address without its fragment, and the SHA-256 in that. Raises UsageError for another
    fragment."""
    plain, has_fragment, fragment = address.partition("#")
    if not has_fragment:
        return address, b""
    given = _SHA256.fullmatch(fragment)
    if given is None:
        shown_address = plain.partition("?")[0]  # a query may hold a secret
        raise UsageError(
            f"bad fragment in {shown_address}#...", advice="it is #sha256= and 64 hex digits"
        )
    return plain, bytes.fromhex(given[1])


class LocalArchive:
    is_local = True
    sha256 = b""

    def __init__(self, path: str) -> None:
        self.name = path
        self.address = os.path.abspath(path)
        self.file_name = os.path.basename(path)

    def stop(self) -> None:
        pass

    def look(self) -> ArchiveState:
        """The tag is the file's mtime. Raises NotFoundError, PermissionDenied, UsageError."""
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
        """Raises PermissionDenied, and OSError if the file has changed since `state`."""
        try:
            file = LocalArchiveFile(self.name)
        except OSError as error:
            raise PermissionDenied(f"cannot read {self.name}: {error.strerror}") from error
        if file.state != (state.size, state.modified_ns):
            file.close()
            raise OSError("it changed while it was being read")
        return file


class HttpArchive:
    is_local = False

    def __init__(self, address: str) -> None:
        """Sends no request yet. Raises UsageError, ConfigError."""
        self.address, self.sha256 = split_sha256(address)
        try:
            parts = urlsplit(self.address)
            host = urllib3.util.parse_url(self.address).host
        except (ValueError, urllib3.exceptions.LocationParseError) as error:
            scheme = self.address.partition(":")[0]  # the rest may hold a secret
            raise UsageError(f"bad address {scheme}://...: it is no URL") from error
        self.name = urlunsplit(parts._replace(query="", fragment=""))
        self.file_name = os.path.basename(unquote(parts.path, errors="surrogateescape").rstrip("/"))
        if "@" in parts.netloc or not parts.hostname or not host:
            raise UsageError(
                f"bad address {parts.scheme}://...: it needs a host, and holds no password",
                advice="every user of this machine could read a password in a command",
            )
        self._pool = _pool(parts.scheme, parts.hostname)
        self._pauses = LongPauses()
        self._place = self.address  # the address after redirections
        self._sends_parts = False
        self._etag = ""  # only a strong one
        self._seen = _Seen()

    def look(self) -> ArchiveState:
        """One byte is requested: the answer has the archive's state."""
        return self._retrying(0).call(self._look)

    def open(self, state: ArchiveState) -> ArchiveFile:
        """Raises OSError if the archive has changed since `look`."""
        if self._sends_parts:
            return FetchedArchiveFile(state.size, self._read, _AHEAD, is_pinned=bool(self.sha256))
        answer = self._retrying(0).call(lambda: self._get(self.address, {}))
        if not self._seen.allows(answer, answer.headers.get("Content-Length", "")):
            answer.close()
            raise OSError("it changed while it was being read")
        read = partial(_read_stream, answer)
        return StreamedArchiveFile(state.size or None, read, answer.close)

    def stop(self) -> None:
        self._pauses.stop()

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
            self._seen = _Seen(etag, headers.get("Last-Modified", ""), size)
            changed = headers.get("Last-Modified", "")
        finally:
            answer.close()
        if not _SIZE.fullmatch(size):
            if self._sends_parts:
                raise ObjectStoreRefused(f"{self.name}: the server does not report its size")
            size = "0"  # not known
        tag = (self._etag or (f"modified {changed}" if changed else ""))[:_TAG_MAX]
        return ArchiveState(tag if int(size) else "", int(size), _time_ns(changed))

    def _read(self, start: int, size: int) -> bytes:
        return self._retrying(size).call(lambda: self._read_once(start, size))

    def _read_once(self, start: int, size: int) -> bytes:
        headers = {"Range": f"bytes={start}-{start + size - 1}"}
        if self._etag:
            headers["If-Match"] = self._etag
        answer = self._get(self._place, headers)
        try:
            sent, _, total = answer.headers.get("Content-Range", "").rpartition("/")
            if answer.status != 206 or not self._seen.allows(answer, total):
                raise ConflictError(f"{self.name} changed while it was being read")
            if sent.partition(" ")[2] != f"{start}-{start + size - 1}":
                raise AttemptFailed(
                    f"{self.name}: the server sent {sent!r}, which was not requested"
                )
            data = answer.read(size)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise AttemptFailed(f"{self.name}: {_reason(error)}") from error
        finally:
            answer.close()
        if len(data) != size:
            raise AttemptFailed(f"{self.name}: the server sent {len(data)} of {size} bytes")
        return data

    def _get(self, address: str, headers: dict[str, str]) -> urllib3.BaseHTTPResponse:
        """Follows redirections; the status is 200, 206 or 416. Raises DieselError for an error of
        the server."""
        is_remembered = address != self.address
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
            answer.close()
            address = self._target(address, answer.headers.get("Location", ""))
        else:
            raise ObjectStoreRefused(f"{self.name}: more than {_REDIRECTS_MAX} redirections")
        self._place = address
        if answer.status in (200, 206, 416):
            return answer
        answer.close()
        reason = f"{self.name}: the server answers {answer.status} {answer.reason or ''}".rstrip()
        match answer.status:
            case 404 | 410:
                raise NotFoundError(reason)
            case 401 | 403:
                self._place = self.address
                if is_remembered:  # an address from a redirection may have expired
                    raise AttemptFailed(reason)
                raise PermissionDenied(reason)
            case 412:
                raise ConflictError(f"{self.name} changed while it was being read")
            case status if status in _BUSY:
                pause_s = retry_after_s(answer.headers.get("Retry-After", ""))
                raise AttemptFailed(reason, pause_s_min=pause_s)
        raise ObjectStoreRefused(reason)

    def _target(self, address: str, location: str) -> str:
        """Raises ObjectStoreRefused if a redirection is not to http or https, or leads from https
        to http."""
        try:
            target = urljoin(address, location)
            scheme = urllib3.util.parse_url(target).scheme
        except (ValueError, urllib3.exceptions.LocationParseError) as error:
            raise ObjectStoreRefused(f"{self.name}: the server redirects to no address") from error
        if scheme not in ("http", "https"):
            raise ObjectStoreRefused(f"{self.name}: the server redirects to no http address")
        if scheme != "https" and urlsplit(address).scheme == "https":
            raise ObjectStoreRefused(f"{self.name}: the server redirects from https to http")
        return target

    def _retrying(self, size: int) -> RetryLoop:
        return RetryLoop(
            _POLICY,
            RetryClock(),
            deadline_s=_POLICY.deadline_for(size),
            attempt_s=_CONNECT_S,
            pauses=self._pauses,
        )


class _Seen(NamedTuple):
    """The server's first report about an archive's bytes."""

    etag: str = ""
    modified: str = ""
    size: str = ""

    def allows(self, answer: urllib3.BaseHTTPResponse, size: str) -> bool:
        """`size` is that of the whole archive in the answer."""
        headers = answer.headers
        return self == (headers.get("ETag", ""), headers.get("Last-Modified", ""), size)


def _time_ns(text: str) -> int:
    """The time of an HTTP header, in nanoseconds since 1970; 0 if it cannot be stored."""
    parsed = email.utils.parsedate_tz(text)
    try:
        seconds = email.utils.mktime_tz(parsed) if parsed else 0
    except (ValueError, OverflowError):
        return 0
    return seconds * _SECOND_NS if abs(seconds) < _TIME_S_END else 0


def _pool(scheme: str, host: str) -> urllib3.PoolManager:
    """Uses the environment's proxy if there is one."""
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
    """The address is left out, as it may hold a secret."""
    cause = error.__cause__ or error
    return str(getattr(cause, "strerror", None) or type(cause).__name__)
