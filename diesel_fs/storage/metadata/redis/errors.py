"""What Redis's errors mean to a user, and which of them may pass. Pure.

Owned here: that no password is ever part of a message: what Redis says is looked through first.
Not owned: how long something is tried again (`link.py`).
"""

import re

import redis.exceptions as errors

from diesel_fs.errors import (
    BusyError,
    CorruptError,
    DeadlineError,
    DieselError,
    MetadataError,
    NoSpaceError,
)
from diesel_fs.storage.metadata.redis.address import RedisAddress

CLIENT_ERRORS = (errors.RedisError, errors.RedisClusterException, OSError)
"""What comes out of the library."""

SILENT, LOADING, UNWRITABLE = "silent", "loading", "unwritable"
"""Why Redis does not serve: it wants to hear TLS; it is not up yet; it can be read only."""


class RetryLater(Exception):
    """Not now, but perhaps soon; `last_error` is the error where there is no time left."""

    def __init__(self, final: DieselError, why: str = "") -> None:
        super().__init__(str(final))
        self.last_error = final
        self.reason = why  # one of those that the words above, or nothing


def _secrets(where: RedisAddress) -> list[str]:
    return [each for each in (where.password, where.sentinel_password) if each]


def safe_cause(error: Exception, where: RedisAddress) -> Exception | None:
    """An error as the cause of another; None where its text holds what nobody may see."""
    text = str(error)
    return None if _UNKNOWN.search(text) or any(s in text for s in _secrets(where)) else error


_UNKNOWN = re.compile(r"unknown command\W+(\w+)", re.IGNORECASE)
"""Redis repeats what was said to it then, and it may have been a password."""


def _redacted(text: str, where: RedisAddress) -> str:
    if unknown := _UNKNOWN.search(text):
        return f"it does not know the command {unknown.group(1)[:20]}"
    for secret in _secrets(where):
        text = text.replace(secret, "***")
    return text


def translate_error(error: Exception, where: RedisAddress) -> DieselError | RetryLater:
    """What an error means to a user; Again where it may pass."""
    cause = error.__cause__
    if isinstance(error, errors.RedisClusterException) and isinstance(cause, errors.RedisError):
        return translate_error(cause, where)
    text = _redacted(str(error), where)
    match error:
        case errors.AuthenticationError() | errors.AuthenticationWrongNumberOfArgsError():
            return MetadataError(
                f"{where} does not accept our user and password",
                advice="set DIESEL_REDIS_USER, DIESEL_REDIS_PASSWORD or DIESEL_REDIS_PASSWORD_FILE",
            )
        case errors.NoPermissionError() | errors.AuthorizationError():
            return _reply("NOPERM", text, where)
        case errors.OutOfMemoryError():
            return _reply("OOM", text, where)
        case errors.ReadOnlyError():
            return _reply("READONLY", text, where)
        case errors.NoScriptError():  # it was given them just now: another has taken its place
            return RetryLater(MetadataError(f"{where} has just been restarted"))
        case errors.InvalidResponse():
            return RetryLater(MetadataError(f"{where} answers what is no answer of a Redis"))
        case errors.TimeoutError() if "handshake" in str(error.__context__):
            error_to_raise = MetadataError(f"no TLS with {where}: it does not answer our greeting")
            return RetryLater(error_to_raise, SILENT)
        case errors.TimeoutError():
            return RetryLater(DeadlineError(f"the metadata store {where} did not answer in time"))
        case errors.BusyLoadingError():
            return RetryLater(MetadataError(f"{where} is loading its data"), LOADING)
        case errors.ConnectionError() if _is_foreign_tls(text):
            return MetadataError(f"no TLS with {where}: {text}")
        case errors.ConnectionError() if _is_hung_up(text) and not where.tls:
            silent = f"the metadata store {where} closes the connection without an answer"
            return RetryLater(
                MetadataError(silent, advice="if it expects TLS, say rediss://"), SILENT
            )
        case errors.ConnectionError() | OSError():
            return RetryLater(MetadataError(f"cannot reach the metadata store {where}: {text}"))
        case (
            errors.RedisClusterException()
            | errors.TryAgainError()
            | errors.ClusterDownError()
            | errors.AskError()
        ):
            return RetryLater(MetadataError(f"the cluster {where} is not complete: {text}"))
    return _reply(_code(text), text, where)


_CODE = re.compile(r"user_script: ?\d+: -?([A-Z]{3,})\b|-([A-Z]{3,}) ")
_CODES = {
    "NOAUTH", "NOPERM", "OOM", "READONLY", "MISCONF", "BUSY", "LOADING", "NOREPLICAS",
    "MASTERDOWN", "UNBLOCKED", "WRONGTYPE",
}  # fmt: skip


def _code(text: str) -> str:
    """What an error is about, by Redis's word for it: the first, or, as Redis 5 and 6 tell what
    went wrong in a script, one in the middle."""
    first = text.split(" ", 1)[0]
    if first in _CODES:
        return first
    found = [code for match in _CODE.finditer(text) for code in match.groups() if code]
    if within := [code for code in found if code in _CODES]:
        return within[0]
    if "OOM command not allowed" in text:
        return "OOM"
    return "SCRIPT" if "user_script" in text else first


def _reply(code: str, text: str, where: RedisAddress) -> DieselError | RetryLater:
    """The meaning of an error by Redis's word for it."""
    match code:
        case "NOAUTH":
            return MetadataError(f"{where} wants a password", advice="set DIESEL_REDIS_PASSWORD")
        case "NOPERM":
            return MetadataError(f"{where} does not allow our user what is needed: {text}")
        case "OOM":
            return _full(where, "its memory is full (maxmemory)")
        case "MISCONF":
            return _full(where, text.removeprefix("MISCONF "))
        case "READONLY":
            told = MetadataError(f"{where} is a read-only replica", advice="name the master")
            return told if where.kind == "redis" else RetryLater(told)
        case "BUSY":
            return RetryLater(BusyError(f"{where} is busy with a script"))
        case "LOADING":
            return RetryLater(MetadataError(f"{where} is loading its data"), LOADING)
        case "NOREPLICAS":
            return RetryLater(MetadataError(f"{where} takes no writes now: {text}"), UNWRITABLE)
        case "MASTERDOWN" | "UNBLOCKED":
            return RetryLater(MetadataError(f"{where} cannot serve now: {text}"))
        case "WRONGTYPE" | "SCRIPT":
            told_of = f"the metadata store {where} has what nobody of us has written: {text}"
            return CorruptError(told_of, advice="run `dlcmd recover`")
    return MetadataError(f"{where} refuses: {text}")


def _full(where: RedisAddress, why: str) -> NoSpaceError:
    return NoSpaceError(f"the metadata store {where} takes nothing more: {why}")


def _is_hung_up(text: str) -> bool:
    return "closed by server" in text or "reset by peer" in text


def _is_foreign_tls(text: str) -> bool:
    faults = ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
    return any(fault in text or fault.replace("_", " ").lower() in text for fault in faults)
