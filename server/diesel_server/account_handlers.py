"""The requests about accounts: `users`, `set_user`, `remove_user`, `import_users`, `grant`.

Owned here: what they hold (`WIRE.md`, section 5). Not owned: who may do what, and what it means
(`repository/admin.py`, which decides on the accounts of that very moment). Thread-safe.
"""

from collections.abc import Mapping

from diesel_fs.errors import UsageError
from diesel_fs.net.messages import Fields
from diesel_fs.repository.admin import DirectAdministration
from diesel_fs.storage.accounts.account import parse_role

from .authentication import TableAuthenticator
from .requests import Handler, Reply, Request


def account_handlers(login: TableAuthenticator) -> Mapping[str, Handler]:
    """The handler of each."""

    def administration(request: Request) -> tuple[DirectAdministration, Fields]:
        fields = {name: value for name, value in request.message.items() if name not in _OURS}
        as_asker = DirectAdministration(login.table, login.current(request.account))
        return as_asker, Fields(fields, str(request.message.get("do", "")))

    def users(request: Request) -> Reply:
        accounts, _ = administration(request)
        return Reply(payload=[accounts.export_text()])

    def set_user(request: Request) -> Reply:
        accounts, fields = administration(request)
        change = accounts.add if fields.flag("new", default=True) else accounts.replace_key
        admin = fields.flag("admin", default=False)
        change(fields.text("user"), fields.octets("public_key"), admin=admin)
        return _done(login)

    def remove_user(request: Request) -> Reply:
        accounts, fields = administration(request)
        accounts.remove(fields.text("user"))
        return _done(login)

    def import_users(request: Request) -> Reply:
        accounts, fields = administration(request)
        if not len(request.payload):
            raise UsageError("import_users: no accounts")
        accounts.import_text(bytes(request.payload), replace=fields.flag("replace", default=False))
        return _done(login)

    def grant(request: Request) -> Reply:
        accounts, fields = administration(request)
        role = parse_role(fields.text("role"))
        accounts.grant(fields.text("dataset"), fields.text("user"), role)
        return _done(login)

    return {
        "users": users,
        "set_user": set_user,
        "remove_user": remove_user,
        "import_users": import_users,
        "grant": grant,
    }


_OURS = {"id", "do"}


def _done(login: TableAuthenticator) -> Reply:
    login.refresh()  # on this server it holds from now on, on others within `REFRESH_S`
    return Reply()
