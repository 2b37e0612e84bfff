"""Greetings, frames and logins: golden bytes; any bytes decode to a value or raise one error."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.errors import CorruptError, ForeignError, UsageError
from diesel_fs.net import frames as wire
from diesel_fs.net.frames import (
    ANSWER_LIMITS,
    BEFORE_LOGIN_LIMITS,
    REQUEST_LIMITS,
    VERSION,
    FrameLimits,
    Lengths,
)

NONCE = bytes(range(32))
BINDING = bytes(range(32, 64))


def test_golden_bytes() -> None:
    """Programs of different versions recognise each other by these bytes."""
    assert wire.greeting() == b"\x93DIESNET\1\0\0\0\0\0\0\0"
    assert wire.welcome(NONCE) == b"\x93DIESNET\1\0\0\0\x20\0\0\0" + NONCE
    assert wire.refusal("no") == b"\x93DIESNET\1\0\1\0\2\0\0\0no"
    assert wire.frame({"a": 1}, REQUEST_LIMITS, 7) == b"\4\0\0\0\7\0\0\0\x81\xa1a\1"
    assert (
        wire.login_challenge(NONCE, BINDING, "me")
        == b"diesel-fs login 1\0" + NONCE + BINDING + b"me"
    )


def test_a_greeting_is_understood() -> None:
    assert wire.parse_greeting(wire.greeting()) == VERSION
    received = wire.welcome(NONCE)
    assert wire.parse_welcome(received[:16]) == (True, VERSION, 32)


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1, 65_535])
def test_another_version_is_refused_with_a_sentence(version: int) -> None:
    """G4: the client's next and previous versions, and the sentence that an old client shows."""
    other = wire.greeting()[:8] + struct.pack("<H", version) + bytes(6)
    assert wire.parse_greeting(other) == version
    sentence = wire.version_mismatch(version)
    assert f"version {VERSION}" in sentence
    assert str(version) in sentence
    assert ("newer client" in sentence) is (version < VERSION)
    received = wire.refusal(sentence)
    goes_on, server, length = wire.parse_welcome(received[:16])
    assert (goes_on, server, length) == (False, VERSION, len(received) - 16)
    assert sentence in str(wire.refusal_error(server, received[16:]))


def test_a_server_of_another_version_that_sends_no_text_is_named() -> None:
    received = b"\x93DIESNET" + struct.pack("<HHI", 9, 1, 0)
    assert wire.parse_welcome(received) == (False, 9, 0)
    assert "version 9" in str(wire.refusal_error(9, b""))
    with pytest.raises(ForeignError):  # it accepts another version than its own
        wire.parse_welcome(b"\x93DIESNET" + struct.pack("<HHI", 9, 0, 32))


@given(st.binary(max_size=40) | st.binary(min_size=16, max_size=16))
def test_any_bytes_are_a_greeting_or_foreign(content: bytes) -> None:
    for parse in (wire.parse_greeting, wire.parse_welcome):
        try:
            parse(content)
        except ForeignError:
            continue
        assert content[:8] == b"\x93DIESNET"


def test_reserved_bytes_must_be_zero_and_long_refusals_are_cut() -> None:
    with pytest.raises(ForeignError):
        wire.parse_greeting(wire.greeting()[:15] + b"\1")
    received = wire.refusal("x" * 5000)
    assert wire.parse_welcome(received[:16]) == (False, VERSION, len(received) - 16)


@pytest.mark.parametrize(
    ("other", "named"),
    [(b"GET / HTTP/1.1\r\n", "HTTP"), (b"HTTP/1.1 400 Bad ", "HTTP"),
     (b"\x16\x03\x01\x02\0\1\0\1\xfc\3\3" + b"x" * 5, "TLS"), (b"\x15\3\1\0\2\2\n", "TLS")],
)  # fmt: skip
def test_F7_another_protocol_is_foreign_and_named(other: bytes, named: str) -> None:
    for parse, end in ((wire.parse_greeting, "client"), (wire.parse_welcome, "server")):
        with pytest.raises(ForeignError, match=f"not a DIESEL-FS {end}: .* it speaks {named}"):
            parse(other[:16])


@pytest.mark.parametrize("limits", [BEFORE_LOGIN_LIMITS, REQUEST_LIMITS, ANSWER_LIMITS])
def test_limits_hold_at_both_ends(limits: FrameLimits) -> None:
    fits = Lengths(limits.head_bytes, limits.payload_bytes)
    assert wire.parse_lengths(struct.pack("<II", *fits), limits) == fits
    wrong = [Lengths(limits.head_bytes + 1, 0), Lengths(0, 0)]
    if limits.payload_bytes < (1 << 32) - 1:
        wrong.append(Lengths(1, limits.payload_bytes + 1))
        with pytest.raises(UsageError):
            wire.frame({}, limits, limits.payload_bytes + 1)
    for lengths in wrong:
        with pytest.raises(CorruptError):
            wire.parse_lengths(struct.pack("<II", *lengths), limits)
    with pytest.raises(UsageError):
        wire.frame({"a": bytes(limits.head_bytes)}, limits)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), VALUES, max_size=5))
def test_frames_are_decoded_as_they_were_encoded(message: dict[str, object]) -> None:
    sent = wire.frame(message, REQUEST_LIMITS, 5)  # type: ignore[arg-type]  # a plain dict is a message
    lengths = wire.parse_lengths(sent[:8], REQUEST_LIMITS)
    assert lengths == (len(sent) - 8, 5)
    assert wire.parse_head(sent[8:], REQUEST_LIMITS) == message


@given(st.binary(max_size=200))
def test_any_head_is_a_message_or_corrupt(content: bytes) -> None:
    try:
        wire.parse_head(content, BEFORE_LOGIN_LIMITS)
    except CorruptError:
        return


def test_a_head_of_too_many_items_is_refused_before_it_is_built() -> None:
    many = b"\x81\xa1a\xdd\xff\xff\xff\xff"
    with pytest.raises(CorruptError, match="too many"):
        wire.parse_head(many, ANSWER_LIMITS)
    inside = wire.frame({"a": [0] * 100}, REQUEST_LIMITS)[8:]
    assert wire.parse_head(inside, REQUEST_LIMITS)
    with pytest.raises(CorruptError, match="too many"):
        wire.parse_head(inside, BEFORE_LOGIN_LIMITS)


def test_an_unknown_required_field_is_refused() -> None:
    wire.check_required_fields({"id": 1, "do": "x", "later": 2})
    with pytest.raises(UsageError, match="later!"):
        wire.check_required_fields({"id": 1, "do": "x", "later!": 2})


@pytest.mark.parametrize("user", ["", "x" * 65, "\u00e9" * 33])
def test_names_of_a_bad_length_cannot_log_in(user: str) -> None:
    with pytest.raises(UsageError):
        wire.login_challenge(NONCE, BINDING, user)


def test_a_login_is_for_one_connection_and_user() -> None:
    """FAULTS S2."""
    mine = wire.login_challenge(NONCE, BINDING, "me")
    others = [
        wire.login_challenge(bytes(32), BINDING, "me"),
        wire.login_challenge(NONCE, wire.NO_BINDING, "me"),
        wire.login_challenge(NONCE, BINDING, "mE"),
    ]
    assert mine not in others
