"""Translates a bucket's answers into errors, and has the limits of one attempt. Pure."""

from dataclasses import dataclass

from ....errors import (
    DieselError,
    NoSpaceError,
    ObjectExists,
    ObjectMissing,
    ObjectStoreError,
    ObjectStoreRefused,
)
from ..retry import AttemptFailed

_SMALL_PUT_BYTES = 4 << 20
_THROTTLED_PAUSE_S = 1.0  # obstore hides Retry-After, which is seconds in most stores
_NO_BUCKET = frozenset({"NoSuchBucket", "InvalidBucketName", "ContainerNotFound"})
_NO_SPACE = frozenset({"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage"})
_CLOCK = frozenset({"RequestTimeTooSkewed", "RequestInTheFuture"})
_EXPIRED = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "RequestExpired"})
_NO_CONDITIONS = frozenset({"NotImplemented", "InvalidArgument", "UnsupportedHeader"})
_ARCHIVED = frozenset({"InvalidObjectState", "BlobArchived"})
_EXISTS = frozenset({"BlobAlreadyExists", "PreconditionFailed"})
_TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_THROTTLED = frozenset({429, 503})


class BrokenBody(AttemptFailed):
    """The body of an answer broke off or stalled; its first `received` bytes are good."""

    def __init__(self, message: str, received: int) -> None:
        super().__init__(message)
        self.received = received


class ChangedObject(AttemptFailed):
    """The object was replaced while it was being read."""


class ConditionsUnsupported(ObjectStoreError):
    retry = False


class PermanentStoreError(ObjectStoreError):
    """The store will answer the same until a person changes something."""

    retry = False


class ObjectArchived(PermanentStoreError):
    """The store returns no bytes of the object before it is restored."""


class RangeNotSatisfiable(ObjectStoreError):
    """The object ends before the range begins."""

    retry = False


class ExpiredCredentials(ObjectStoreRefused):
    """The credentials have expired."""


@dataclass(frozen=True, slots=True)
class AttemptLimits:
    connect_s: float = 5.0
    stall_s: float = 10.0
    """Longest pause between two bytes of a read, and longest time of a request without content."""
    put_stall_s: float = 20.0
    """A put's time beyond the transfer of its bytes: some stores answer only after they have made
    copies."""
    bytes_per_s_min: float = 256 * 1024
    put_bytes_max: int = 128 << 20
    """Larger objects are put in parts: stores take at most 5 GiB in one request, and one stream is
    slow."""
    part_bytes: int = 32 << 20
    """Stores take at most 10,000 parts, each but the last of at least 5 MiB."""
    page_keys: int = 1000
    """S3 returns no more in one page of a listing."""

    def attempt_s(self, size: int, put: bool) -> float:
        """Seconds in which one attempt must move `size` bytes."""
        if put:
            return self.put_stall_s + _put_class(size) / self.bytes_per_s_min
        return self.stall_s + size / self.bytes_per_s_min


@dataclass(frozen=True, slots=True)
class CloudObject:
    """`modified_ns` counts from 1970."""

    key: str
    bytes: int
    modified_ns: int
    etag: str | None


def meaning_of_status(
    what: str, status: int, code: str, exists: bool, pause_s: float = 0.0
) -> DieselError:
    """The error that an answer means, by its HTTP status and the vendor's error code ("": none).
    `what` begins the message. `exists`: obstore reports that the object exists. `pause_s`: the
    pause that the store demands (0: none known)."""
    if code in _NO_BUCKET:
        return PermanentStoreError(
            f"{what}: no such bucket", advice="check its name, and create it first"
        )
    if code in _ARCHIVED:
        return ObjectArchived(f"{what}: it is archived", advice="have the store restore it first")
    if code in _CLOCK:
        return ObjectStoreRefused(what, advice="this machine's clock is wrong by minutes: set it")
    if code in _EXPIRED:
        return ExpiredCredentials(what, advice="the credentials have expired: renew them")
    if code in _NO_SPACE or status == 507:
        return NoSpaceError(what, advice="free some space, or raise the quota")
    if exists and (status in (304, 412) or code in _EXISTS):
        return ObjectExists(f"{what}: exists already")
    if code == "NoSuchUpload":  # ended, perhaps by our last request, if its answer was lost
        return AttemptFailed(what, may_have_succeeded=True)
    match status:
        case 401 | 403:
            # S3 also answers so for a missing key, if the user may not list the bucket.
            return ObjectStoreRefused(what, advice="check the credentials, and what they may do")
        case 404:
            return ObjectMissing(f"{what}: no such object")
        case 412:
            return ChangedObject(f"{what}: it has changed meanwhile", may_have_succeeded=False)
        case 416:
            return RangeNotSatisfiable(what)
        case 301 | 302 | 307 | 308:
            return PermanentStoreError(
                f"{what}: it is elsewhere", advice="set AWS_REGION, or the endpoint"
            )
        case _ if status == 501 or code in _NO_CONDITIONS:
            return ConditionsUnsupported(what)
        case _ if status in _TRANSIENT or status > 507:
            pause_s = max(pause_s, _THROTTLED_PAUSE_S if status in _THROTTLED else 0.0)
            return AttemptFailed(what, may_have_succeeded=status >= 500, pause_s_min=pause_s)
    return PermanentStoreError(what)


def _put_class(size: int) -> int:
    """The next power of two: a client serves one time limit, so puts of similar sizes share one."""
    return 1 << (max(size, _SMALL_PUT_BYTES) - 1).bit_length()
