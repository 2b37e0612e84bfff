"""The verb `user`: the accounts of a server.

`user add` makes the secret key in this process and shows it once. Only the public half is sent and
stored.
"""

import os
import sys
from pathlib import Path

import click

from diesel_fs.credentials import key_text
from diesel_fs.errors import ConflictError, UsageError
from diesel_fs.net import keys
from diesel_fs.storage.accounts.account import (
    TEXT_BYTES_MAX,
    Account,
    check_user_name,
    parse_accounts,
    parse_public_key,
    public_key_text,
)
from diesel_fs.system.atomic_file import atomic_file, is_stdout, write_error
from diesel_fs.urls import SERVER_SCHEMES, parse_url

from ..args.accounts import open_accounts
from ..args.options import (
    HELP_NAMES,
    argument,
    file_path,
    global_flags,
    global_options,
    option,
)
from ..show.output import count_text, print_json, print_note, print_result, write_stdout


@global_options
@click.group("user", context_settings=HELP_NAMES)
def user() -> None:
    """Add, remove, list, export or import the users of a server.

    Add the first user with direct access to the repository (--url), and the others that way or
    through the server.

    \b
    Examples:
      dlcmd --url "file:///data?meta=redis://localhost" user add root --admin
      dlcmd user add ann
      dlcmd user export accounts.jsonl
    """


@user.command("add", context_settings=HELP_NAMES)
@argument("name", type=check_user_name, metavar="NAME")
@option("--admin", is_flag=True, help="Let the user administer all datasets and accounts.")
@option("--renew", is_flag=True, help="Give an existing user another key; the roles stay.")
@option("--public-key", metavar="TEXT", help="Use a key made elsewhere: this is its public half.")
@option(
    "--key-out",
    type=file_path,
    metavar="FILE",
    help="Write the key to a new file, readable by you alone, and do not print it.",
)
def user_add(
    name: str, admin: bool, renew: bool, public_key: str | None, key_out: Path | None
) -> None:
    """Add a user; make the user's key and print it once.

    \b
    Examples:
      dlcmd user add ann --key-out ann.key
      dlcmd user add root --admin --key-out ~/.config/diesel/key
      dlcmd user add ann --renew
    """
    if public_key is not None and key_out is not None:
        raise UsageError(
            "--public-key and --key-out cannot be used together",
            advice="with --public-key no key is made that could be written",
        )
    seed = None if public_key is not None else keys.new_seed()
    public = parse_public_key(public_key or "") if seed is None else keys.public_key(seed)
    with open_accounts(create=not renew) as accounts:
        if seed is not None and key_out is not None:
            _write_key(key_out, seed)
        try:
            (accounts.replace_key if renew else accounts.add)(name, public, admin=admin)
        except BaseException:
            if seed is not None and key_out is not None:
                key_out.unlink()  # no account has this key, or --renew can replace it
            raise
    described: dict[str, object] = {
        "user": name,
        "admin": admin,
        "public_key": public_key_text(public),
    }
    if key_out is not None:
        described["key_file"] = str(key_out)
    elif seed is not None:
        described["key"] = key_text(seed)
    if "key" in described and not global_flags().json:
        write_stdout([f"{described['key']}\n".encode()])
        print_note(
            f"this is the key of {name}; it is not shown again. To use it: write it to a file,"
        )
        print_note(f"`chmod 600` the file, and give --user {name} --key-file FILE")
    else:
        print_result(described, f"{'renewed' if renew else 'added'} {name}")


def _write_key(path: Path, seed: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except FileExistsError:
        raise ConflictError(f"{path} exists", advice="name a new file for the key") from None
    with open(fd, "wb") as file:
        file.write(key_text(seed).encode() + b"\n")
        file.flush()
        os.fsync(fd)


@user.command("rm", context_settings=HELP_NAMES)
@argument("name", type=check_user_name, metavar="NAME")
def user_rm(name: str) -> None:
    """Remove a user, and close the connections of that user within seconds.

    \b
    Example:
      dlcmd user rm ann
    """
    with open_accounts() as accounts:
        accounts.remove(name)
        if parse_url(global_flags().settings().repository_url).scheme not in SERVER_SCHEMES:
            left = accounts.accounts()
            if not any(account.admin for account in left.values()):
                print_note("there is no administrator now; `dlcmd user add NAME --admin` makes one")
    print_result({"removed": name}, f"removed {name}")


@user.command("ls", context_settings=HELP_NAMES)
def user_ls() -> None:
    """List users and their roles.

    \b
    Examples:
      dlcmd user ls
      dlcmd user ls --json
    """
    with open_accounts() as administration:
        accounts = administration.accounts()
    if global_flags().json:
        for account in accounts.values():
            print_json(_described(account))
        return
    width = max(map(len, accounts), default=0)
    write_stdout(
        f"{name:<{width}}  {_roles(account)}".rstrip().encode() + b"\n"
        for name, account in sorted(accounts.items())
    )


def _described(account: Account) -> dict[str, object]:
    return {
        "user": account.name,
        "public_key": public_key_text(account.public_key),
        "admin": account.admin,
        "grants": {name: role.text for name, role in account.grants.items()},
    }


def _roles(account: Account) -> str:
    roles = [f"{name}:{role.text}" for name, role in sorted(account.grants.items())]
    return " ".join((["admin"] if account.admin else []) + roles)


@user.command("export", context_settings=HELP_NAMES)
@argument("file", default="-", metavar="[FILE]")
def user_export(file: str) -> None:
    """Write all accounts as text: names, public keys and roles, but no secret.

    \b
    Examples:
      dlcmd user export accounts.jsonl
      dlcmd user export | ssh backup "cat > accounts.jsonl"
    """
    with open_accounts() as accounts:
        text = accounts.export_text()
    count = len(parse_accounts(text))
    path = Path(file)
    if file == "-" or is_stdout(path):
        write_stdout([text])
        return
    try:
        with atomic_file(path) as opened:
            opened.write(text)
    except OSError as error:
        raise write_error(path, error) from error
    print_result({"users": count, "file": file}, f"wrote {count_text(count, 'user')} to {file}")


@user.command("import", context_settings=HELP_NAMES)
@argument("file", metavar="FILE|-")
@option("--replace", is_flag=True, help="Remove all users that are not in the file.")
def user_import(file: str, replace: bool) -> None:
    """Add the accounts of an export: all of them, or none if one is not valid.

    An existing user gets the key and roles in the file. Other users stay, unless --replace.

    \b
    Examples:
      dlcmd user import accounts.jsonl
      dlcmd --url "file:///data?meta=redis://localhost" user import accounts.jsonl
    """
    text = _content(file)
    more = parse_accounts(text)
    with open_accounts(create=True) as accounts:
        accounts.import_text(text, replace=replace)
    print_result(
        {"users": len(more), "replaced": replace}, f"imported {count_text(len(more), 'user')}"
    )


def _content(file: str) -> bytes:
    if file == "-":
        return sys.stdin.buffer.read(TEXT_BYTES_MAX + 1)
    try:
        with open(file, "rb") as opened:
            return opened.read(TEXT_BYTES_MAX + 1)
    except IsADirectoryError:
        raise UsageError(f"{file} is a folder", advice="name the file of an export") from None


for _command in user.commands.values():
    global_options(_command)
