"""Accounts as values: roles, names, keys, changes; and their text, also malformed."""

import json
from base64 import b64encode
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.credentials import key_text
from diesel_fs.errors import (
    ConflictError,
    CorruptError,
    MetadataError,
    NewerVersionError,
    NoSuchDataset,
    NotFoundError,
    PermissionDenied,
    UsageError,
)
from diesel_fs.net import keys
from diesel_fs.storage.accounts.account import (
    ACCOUNTS_MAX,
    GRANTS_MAX,
    PUBLIC_KEY_PREFIX,
    TEXT_BYTES_MAX,
    Account,
    Role,
    account_line,
    accounts_text,
    check_admin_left,
    check_public_key,
    check_user_name,
    parse_accounts,
    parse_public_key,
    parse_role,
    public_key_text,
    with_account,
    with_accounts,
    with_new_key,
    with_role,
    without_account,
)
from tests.rows import each_row

PUBLIC = keys.public_key(bytes(32))
OTHER = keys.public_key(bytes(31) + b"1")
ANN = Account("ann", PUBLIC, admin=True)
BOB = Account("bob", OTHER, grants={"pets": Role.READ, "cars": Role.ADMIN})
BOTH = {"ann": ANN, "bob": BOB}
HEAD = '{"diesel-accounts": 1}\n'


@each_row(
    ("dataset", "role", "error"),
    [
        ("pets", Role.READ, None),
        ("pets", Role.WRITE, PermissionDenied),
        ("pets", Role.ADMIN, PermissionDenied),
        ("cars", Role.ADMIN, None),
        ("gone", Role.READ, NoSuchDataset),
        ("gone", Role.ADMIN, NoSuchDataset),  # as if it did not exist
    ],
)
def test_rights_of_each_role(dataset: str, role: Role, error: type[Exception] | None) -> None:
    ANN.require(dataset, role)
    ANN.require_admin()
    if error is None:
        BOB.require(dataset, role)
    else:
        with pytest.raises(error):
            BOB.require(dataset, role)
    with pytest.raises(PermissionDenied):
        BOB.require_admin()


def test_under_a_ceiling_a_user_may_only_read() -> None:
    """The error is not PermissionDenied, since the same may be allowed later."""
    low = Account("ann", PUBLIC, admin=True, ceiling=Role.READ)
    low.require("pets", Role.READ)
    assert low.role("pets") is Role.READ
    with pytest.raises(MetadataError):
        low.require("pets", Role.WRITE)
    with pytest.raises(MetadataError):
        low.require_admin()
    bob = Account("bob", OTHER, grants={"pets": Role.READ}, ceiling=Role.READ)
    with pytest.raises(PermissionDenied):  # he never may
        bob.require("pets", Role.WRITE)


def test_user_names() -> None:
    for name in ("a", "0", "ann.lee-2_x", "a" * 32):
        assert check_user_name(name) == name
    bad = ["", "Ann", "-a", ".a", "a" * 33, "a b", "a/b", "a\n", "ä", "=", "a\0", "*", "../x"]
    for name in bad:
        with pytest.raises(UsageError):
            check_user_name(name)


@given(st.binary(min_size=32, max_size=32))
def test_every_generated_key_is_accepted(seed: bytes) -> None:
    public = keys.public_key(seed)
    assert parse_public_key(f"  {public_key_text(public)}\n") == check_public_key(public) == public
    assert keys.verify(public, keys.sign(seed, b"words"), b"words")
    assert not keys.verify(public, keys.sign(seed, b"words"), b"other words")


# All encodings of the points of small order: with one of these as a user's "key", anybody gets in
SMALL = [y.to_bytes(32, "little") for y in (0, 1, 2**255 - 20, 2**255 - 19, 2**255 - 18)] + [
    bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"),
    bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"),
]


@each_row("public", [*SMALL, *(each[:31] + bytes([each[31] | 128]) for each in SMALL)])
def test_keys_that_anybody_can_sign_for_are_refused(public: bytes) -> None:
    with pytest.raises(UsageError):
        parse_public_key(PUBLIC_KEY_PREFIX + b64encode(public).decode())
    # The library itself accepts these keys, so `check_public_key` is the only check
    assert keys.verify(SMALL[1], SMALL[1] + bytes(32), b"whatever is asked for")


@each_row(
    "text",
    ["", "x", PUBLIC_KEY_PREFIX, public_key_text(PUBLIC)[:-2], public_key_text(bytes([2]) * 32)],
)
def test_malformed_public_keys_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_public_key(text)


def test_S8_a_secret_key_in_the_place_of_a_public_one_is_not_repeated() -> None:
    secret = key_text(b"\x77" * 32)
    with pytest.raises(UsageError) as caught:
        parse_public_key(secret)
    assert secret[-20:] not in str(caught.value)


def test_other_bytes_are_not_a_signature() -> None:
    for signature in (b"", bytes(64), b"\xff" * 64, bytes(65)):
        assert not keys.verify(PUBLIC, signature, b"x")
    assert not keys.verify(b"", bytes(64), b"x")
    assert len({keys.new_seed() for _ in range(9)}) == 9


def test_changes_of_accounts() -> None:
    assert with_account({}, ANN) == {"ann": ANN}
    with pytest.raises(ConflictError):
        with_account(BOTH, Account("ann", OTHER))
    new = with_new_key(BOTH, "bob", PUBLIC, admin=False)
    assert (new["bob"].public_key, new["bob"].grants) == (PUBLIC, BOB.grants)
    assert with_new_key(BOTH, "ann", OTHER, admin=False)["ann"].admin
    assert set(without_account(BOTH, "ann")) == {"bob"}
    assert with_role(BOTH, "bob", "pets", Role.WRITE)["bob"].grants["pets"] is Role.WRITE
    assert with_role(BOTH, "bob", "pets", Role.NONE)["bob"].grants == {"cars": Role.ADMIN}
    assert with_accounts(BOTH, [Account("bob", PUBLIC)])["bob"].grants == {}
    with pytest.raises(NotFoundError):
        without_account(BOTH, "eve")
    with pytest.raises(NotFoundError):
        with_new_key(BOTH, "eve", PUBLIC, admin=True)
    with pytest.raises(NotFoundError):
        with_role(BOTH, "eve", "pets", Role.READ)
    assert BOTH == {"ann": ANN, "bob": BOB}
    check_admin_left(BOTH, without_account(BOTH, "bob"))
    check_admin_left({}, {"bob": BOB})
    with pytest.raises(ConflictError):
        check_admin_left(BOTH, without_account(BOTH, "ann"))


def test_too_many_users_or_roles_are_refused() -> None:
    many = {f"u{i}": Account(f"u{i}", PUBLIC) for i in range(ACCOUNTS_MAX)}
    with pytest.raises(UsageError):
        with_account(many, ANN)
    full = Account("eve", PUBLIC, grants={f"d{i}": Role.READ for i in range(GRANTS_MAX)})
    with pytest.raises(UsageError):
        with_role({"eve": full}, "eve", "one-more", Role.READ)


# Text

names = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,31}", fullmatch=True)
datasets = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True)
roles = st.sampled_from([Role.READ, Role.WRITE, Role.ADMIN])


@given(st.dictionaries(names, st.tuples(st.booleans(), st.dictionaries(datasets, roles))))
def test_accounts_survive_as_text(users: dict[str, tuple[bool, dict[str, Role]]]) -> None:
    accounts = {
        name: Account(name, PUBLIC, admin, grants) for name, (admin, grants) in users.items()
    }
    assert parse_accounts(accounts_text(accounts).encode()) == accounts


def line(**changed: object) -> str:
    described = {"user": "ann", "public_key": public_key_text(PUBLIC), "admin": False, "grants": {}}
    return HEAD + json.dumps({**described, **changed}) + "\n"


@each_row(
    "text",
    [
        "",
        "\n",
        "[]\n",
        '{"diesel-accounts": true}\n',
        '{"diesel-accounts": 0}\n',
        '{"diesel-accounts": 1, "more": 1}\n',
        account_line(ANN),
        HEAD + "\n",
        HEAD + "{}\n",
        HEAD + "[" * 100_000,
        HEAD + "9" * 10_000,
        HEAD + account_line(ANN) + "\n" + account_line(ANN) + "\n",
        HEAD + account_line(ANN)[:-1] + ', "user": "eve"}',
        line(user="Ann"),
        line(user=1),
        line(user="../x"),
        line(public_key=""),
        line(public_key=PUBLIC_KEY_PREFIX + b64encode(bytes(32)).decode()),
        line(public_key=None),
        line(admin=1),
        line(admin="false"),
        line(grants=[]),
        line(grants={"../x": "read"}),
        line(grants={"pets": "none"}),
        line(grants={"pets": "owner"}),
        line(grants={"pets": 3}),
        line(grants={f"d{i}": "read" for i in range(GRANTS_MAX + 1)}),
        line(more=1),
        HEAD + "\ud800",
        "\0" * (TEXT_BYTES_MAX + 1),
        HEAD + "\n" * (ACCOUNTS_MAX + 2),
    ],
)
def test_a_malformed_text_is_refused(text: str) -> None:
    with pytest.raises(CorruptError):
        parse_accounts(text.encode(errors="surrogatepass"))


def test_a_text_of_a_newer_version_is_refused() -> None:
    with pytest.raises(NewerVersionError):
        parse_accounts(b'{"diesel-accounts": 2, "users": []}\n')


@given(st.binary(max_size=200))
def test_any_bytes_are_accounts_or_a_corrupt_error(content: bytes) -> None:
    for each in (content, HEAD.encode() + content):
        with suppress(CorruptError, NewerVersionError):
            parse_accounts(each)


def test_roles_are_parsed_by_name() -> None:
    assert [parse_role(role.text) for role in Role] == [*Role]
    with pytest.raises(UsageError):
        parse_role("owner")
