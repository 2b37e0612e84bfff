"""The requests about accounts: `users`, `set_user`, `remove_user`, `import_users`, `grant`.

`WIRE.md`, section 5, has their fields. `DirectAdministration` checks, in the same step as the
change, that the user may make it.
"""

from collections.abc import Callable, Mapping
from functools import partial

from diesel_fs.errors import UsageError
from diesel_fs.net.messages import Fields
from diesel_fs.repository.admin import DirectAdministration
from diesel_fs.storage.accounts.account import parse_role

from ..requests.dispatcher import Handler, HandlerThreads, Reply, Request
from .authentication import TableAuthenticator

_THREADS = 48

Work = Callable[[DirectAdministration, Fields, memoryview], bytes | None]
"""Gets the request's own fields. Returns the payload of the reply; None after a change."""


def account_handlers(login: TableAuthenticator) -> Mapping[str, Handler]:
    threads = HandlerThreads(_THREADS)

    def in_thread(work: Work) -> Handler:
        def run(request: Request) -> Reply:
            """A change takes effect here at once, on other servers within
            `authentication.REFRESH_S`."""
            message = request.message
            own = {name: value for name, value in message.items() if name not in ("id", "do")}
            accounts = DirectAdministration(login.table, login.current(request.account))
            text = work(accounts, Fields(own, str(message.get("do", ""))), request.payload)
            if text is not None:
                return Reply(payload=[text])
            login.refresh()
            return Reply()

        async def handle(request: Request) -> Reply:
            return await threads.run(partial(run, request))

        return handle

    return {
        "users": in_thread(lambda accounts, *_: accounts.export_text()),
        "set_user": in_thread(_set_user),
        "remove_user": in_thread(lambda accounts, own, _: accounts.remove(own.text("user"))),
        "import_users": in_thread(_import_users),
        "grant": in_thread(_grant),
    }


def _set_user(accounts: DirectAdministration, own: Fields, _: memoryview) -> None:
    change = accounts.add if own.flag("new", default=True) else accounts.replace_key
    admin = own.flag("admin", default=False)
    change(own.text("user"), own.octets("public_key"), admin=admin)


def _import_users(accounts: DirectAdministration, own: Fields, payload: memoryview) -> None:
    if not len(payload):
        raise UsageError("import_users: no accounts")
    accounts.import_text(bytes(payload), replace=own.flag("replace", default=False))


def _grant(accounts: DirectAdministration, own: Fields, _: memoryview) -> None:
    accounts.grant(own.text("dataset"), own.text("user"), parse_role(own.text("role")))
