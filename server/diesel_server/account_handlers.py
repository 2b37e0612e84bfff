"""The requests about accounts: `users`, `set_user`, `remove_user`, `import_users`, `grant`.

`WIRE.md` section 5 says what they contain. `DirectAdministration` decides who may do what, on the
accounts as they are at that moment.
"""

from collections.abc import Callable, Mapping
from functools import partial

from diesel_fs.errors import UsageError
from diesel_fs.net.messages import Fields
from diesel_fs.repository.admin import DirectAdministration
from diesel_fs.storage.accounts.account import parse_role

from .authentication import TableAuthenticator
from .requests import Handler, HandlerThreads, Reply, Request

_THREADS = 48


def account_handlers(login: TableAuthenticator) -> Mapping[str, Handler]:
    """The handler of each request about accounts."""
    threads = HandlerThreads(_THREADS)

    def in_thread(work: Callable[[TableAuthenticator, Request], Reply]) -> Handler:
        async def handle(request: Request) -> Reply:
            return await threads.run(partial(work, login, request))

        return handle

    return {
        "users": in_thread(_users),
        "set_user": in_thread(_set_user),
        "remove_user": in_thread(_remove_user),
        "import_users": in_thread(_import_users),
        "grant": in_thread(_grant),
    }


def _administration(
    login: TableAuthenticator, request: Request
) -> tuple[DirectAdministration, Fields]:
    """The administration of accounts as the user who asks, and the request's own fields."""
    fields = {name: value for name, value in request.message.items() if name not in ("id", "do")}
    as_asker = DirectAdministration(login.table, login.current(request.account))
    return as_asker, Fields(fields, str(request.message.get("do", "")))


def _users(login: TableAuthenticator, request: Request) -> Reply:
    accounts, _ = _administration(login, request)
    return Reply(payload=[accounts.export_text()])


def _set_user(login: TableAuthenticator, request: Request) -> Reply:
    accounts, fields = _administration(login, request)
    change = accounts.add if fields.flag("new", default=True) else accounts.replace_key
    admin = fields.flag("admin", default=False)
    change(fields.text("user"), fields.octets("public_key"), admin=admin)
    return _changed(login)


def _remove_user(login: TableAuthenticator, request: Request) -> Reply:
    accounts, fields = _administration(login, request)
    accounts.remove(fields.text("user"))
    return _changed(login)


def _import_users(login: TableAuthenticator, request: Request) -> Reply:
    accounts, fields = _administration(login, request)
    if not len(request.payload):
        raise UsageError("import_users: no accounts")
    accounts.import_text(bytes(request.payload), replace=fields.flag("replace", default=False))
    return _changed(login)


def _grant(login: TableAuthenticator, request: Request) -> Reply:
    accounts, fields = _administration(login, request)
    role = parse_role(fields.text("role"))
    accounts.grant(fields.text("dataset"), fields.text("user"), role)
    return _changed(login)


def _changed(login: TableAuthenticator) -> Reply:
    """The empty reply to a change, which takes effect on this server at once, and on others within
    `authentication.REFRESH_S`."""
    login.refresh()
    return Reply()
