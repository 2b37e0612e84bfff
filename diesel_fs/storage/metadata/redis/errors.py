"""Translates Redis's errors to errors of DIESEL-FS, and decides which are worth another try. Pure.

Texts from Redis may repeat a password, so they are redacted.
"""

import re

import redis.exceptions as errors

from ....errors import (
    BusyError,
    CorruptError,
    DeadlineError,
    DieselError,
    MetadataError,
    NoSpaceError,
)
from .address import RedisAddress

CLIENT_ERRORS = (errors.RedisError, errors.RedisClusterException, OSError)

SILENT, LOADING, UNWRITABLE = "silent", "loading", "unwritable"
"""Values of `RetryLater.reason`: Redis seems to expect TLS; it is loading data; it accepts reads
only."""


class RetryLater(Exception):
    """An error that may pass. At the deadline, `last_error` is raised instead."""

    def __init__(self, last_error: DieselError, reason: str = "") -> None:
        super().__init__(str(last_error))
        self.last_error = last_error
        self.reason = reason  # SILENT, LOADING, UNWRITABLE or empty


def _secrets(where: RedisAddress) -> list[str]:
    return [each for each in (where.password, where.sentinel_password) if each]


def safe_cause(error: Exception, where: RedisAddress) -> Exception | None:
    """None if the error's text may have a password in it."""
    text = str(error)
    return None if _UNKNOWN.search(text) or any(s in text for s in _secrets(where)) else error


_UNKNOWN = re.compile(r"unknown command\W+(\w+)", re.IGNORECASE)
"""This error of Redis repeats the arguments, which may have been a password."""


_CONNECTING = re.compile(r"Error -?\d+ connecting to \S+\. (?=\S)")
"""redis-py repeats the address here, which our message has already."""


def _redacted(text: str, where: RedisAddress) -> str:
    if unknown := _UNKNOWN.search(text):
        return f"it does not know the command {unknown.group(1)[:20]}"
    for secret in _secrets(where):
        text = text.replace(secret, "***")
    return _CONNECTING.sub("", text).rstrip(".")


def translate_error(error: Exception, where: RedisAddress) -> DieselError | RetryLater:
    """A RetryLater if the error may pass."""
    cause = error.__cause__
    if isinstance(error, errors.RedisClusterException) and isinstance(cause, errors.RedisError):
        return translate_error(cause, where)
    text = _redacted(str(error), where)
    match error:
        case errors.AuthenticationError() | errors.AuthenticationWrongNumberOfArgsError():
            return MetadataError(
                f"{where} does not accept the user and password",
                advice="set DIESEL_REDIS_USER, DIESEL_REDIS_PASSWORD or DIESEL_REDIS_PASSWORD_FILE",
            )
        case errors.NoPermissionError() | errors.AuthorizationError():
            return _reply("NOPERM", text, where)
        case errors.OutOfMemoryError():
            return _reply("OOM", text, where)
        case errors.ReadOnlyError():
            return _reply("READONLY", text, where)
        case errors.NoScriptError():  # the scripts were just loaded: this is another server
            return RetryLater(MetadataError(f"{where} has just been restarted"))
        case errors.InvalidResponse():
            return RetryLater(MetadataError(f"{where} does not answer as a Redis does"))
        case errors.TimeoutError() if "handshake" in str(error.__context__):
            unanswered = f"no TLS with {where}: it does not answer the handshake"
            return RetryLater(MetadataError(unanswered), SILENT)
        case errors.TimeoutError():
            return RetryLater(DeadlineError(f"the metadata store {where} did not answer in time"))
        case errors.BusyLoadingError():
            return RetryLater(MetadataError(f"{where} is loading its data"), LOADING)
        case errors.ConnectionError() if _is_foreign_tls(text):
            return MetadataError(f"no TLS with {where}: {text}")
        case errors.ConnectionError() if _is_hung_up(text) and not where.tls:
            silent = f"the metadata store {where} closes the connection without an answer"
            return RetryLater(
                MetadataError(silent, advice="if it expects TLS, use rediss://"), SILENT
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
    """The first word of Redis's text. After an error in a script, Redis 5 and 6 put the code in the
    middle."""
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
    match code:
        case "NOAUTH":
            return MetadataError(f"{where} needs a password", advice="set DIESEL_REDIS_PASSWORD")
        case "NOPERM":
            return MetadataError(f"{where} does not allow this user to do that: {text}")
        case "OOM":
            return _full(where, "its memory is full (maxmemory)")
        case "MISCONF":
            return _full(where, text.removeprefix("MISCONF "))
        case "READONLY":
            replica = MetadataError(f"{where} is a read-only replica", advice="name the master")
            return replica if where.kind == "redis" else RetryLater(replica)
        case "BUSY":
            return RetryLater(BusyError(f"{where} is busy with a script"))
        case "LOADING":
            return RetryLater(MetadataError(f"{where} is loading its data"), LOADING)
        case "NOREPLICAS":
            return RetryLater(MetadataError(f"{where} takes no writes now: {text}"), UNWRITABLE)
        case "MASTERDOWN" | "UNBLOCKED":
            return RetryLater(MetadataError(f"{where} cannot serve now: {text}"))
        case "WRONGTYPE" | "SCRIPT":
            foreign = f"the metadata store {where} holds data that DIESEL-FS did not write: {text}"
            return CorruptError(foreign, advice="run `dlcmd recover`")
    return MetadataError(f"{where} refuses a command: {text}")


def _full(where: RedisAddress, reason: str) -> NoSpaceError:
    return NoSpaceError(f"the metadata store {where} accepts no more data: {reason}")


def _is_hung_up(text: str) -> bool:
    return "closed by server" in text or "reset by peer" in text


def _is_foreign_tls(text: str) -> bool:
    faults = ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
    return any(fault in text or fault.replace("_", " ").lower() in text for fault in faults)
