"""The verb `dashboard`: it listens, and answers with the page and what the page asks for."""

import math
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path

from diesel_fs.errors import ConfigError
from diesel_fs.net.endpoints import is_local, listen, parse_endpoint
from diesel_fs.settings import private_bytes
from diesel_fs.urls import HostPort

from ..args.options import file_path, global_flags, option, verb
from ..dashboard.access import TOKEN_CHARS_MIN, Access
from ..dashboard.datasets import DatasetsSource
from ..dashboard.servers import ServerSource, parse_metrics_place
from ..dashboard.watcher import Watcher
from ..dashboard.web import Answer, Request, WebServer
from ..show.output import print_result

DEFAULT_LISTEN = "127.0.0.1:9320"
TOKEN_VARIABLE = "DIESEL_DASHBOARD_TOKEN"  # noqa: S105  # the name of a variable
TOKEN_BYTES_MAX = 4096
STATE_WAIT_S = 5.0
"""How long a page waits for a newer state before it asks again."""

_KINDS = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_SCRIPT = "text/javascript; charset=utf-8"
_JSON = "application/json"

SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every answer. The page may load nothing from elsewhere, and run no script in it."""


@verb("dashboard")
@option(
    "--listen", "place", metavar="[HOST:]PORT", default=DEFAULT_LISTEN, show_default=True,
    help="Address at which the page is served. One that other machines can reach needs a token."
    " Port 0 is any free one.",
)  # fmt: skip
@option(
    "--server-metrics", "servers", metavar="[HOST:]PORT|URL", multiple=True,
    help="Show this server, too: give what its option --metrics says. Repeatable.",
)  # fmt: skip
@option(
    "--token-file", type=file_path, metavar="FILE",
    help=f"A file with the token that pages must know.  [or env: {TOKEN_VARIABLE}]",
)  # fmt: skip
def dashboard(place: str, servers: tuple[str, ...], token_file: Path | None) -> None:
    """Show mounts, tasks, servers and datasets live, as a page in the browser.

    The page shows all mounts that you have made on this machine, also later ones, the tasks that
    they are in, the datasets of the repository (--url), and the servers that you name. It says what
    readers wait for, where reads are answered from, how far each rank is in its plan, and how all
    that went in the last hour. It changes nothing, and works without the internet.

    Without a token the page can be reached from this machine only. From another one, use
    `ssh -L 9320:localhost:9320 HOST`; or give a token, of 16 characters at least, and open
    http://HOST:PORT/?token=TOKEN once in each browser. The token and all figures then cross the
    network unencrypted.

    Ctrl-C ends it with exit code 0.

    \b
    Examples:
      dlcmd dashboard
      dlcmd dashboard --server-metrics 9400 --server-metrics gpu7:9400
      (umask 077; openssl rand -hex 16 > token)
      dlcmd dashboard --listen 0.0.0.0:9320 --token-file token
    """
    wanted = parse_endpoint(place, default_host="127.0.0.1")
    settings = global_flags().settings()
    places = [parse_metrics_place(each) for each in servers]
    token = _read_token(token_file)
    if not token and not is_local(wanted):
        raise ConfigError(
            f"other machines can reach {wanted}, and there is no token",
            advice=f"give --token-file or {TOKEN_VARIABLE}, or listen at 127.0.0.1",
        )
    sockets = listen(wanted)
    at = HostPort(wanted.host, sockets[0].getsockname()[1])
    sources = [ServerSource(f"server-{i + 1}", *each) for i, each in enumerate(places)]
    watcher = Watcher(sources, DatasetsSource(settings))
    site = Site(watcher, Access(token, {wanted.host}))
    web = WebServer(sockets, site.answer, SECURITY_HEADERS)
    threading.Thread(target=web.serve, name="web", daemon=True).start()
    url = f"http://{at}/"
    print_result({"url": url}, f"the dashboard is at {url}" + ("?token=..." if token else ""))
    with suppress(KeyboardInterrupt):
        watcher.run()


def _read_token(file: Path | None) -> str:
    """The token, from a file or the environment; empty without one. Raises ConfigError."""
    if file is not None:
        text = private_bytes(file, "the dashboard's token", TOKEN_BYTES_MAX).decode("latin-1")
    else:
        text = os.environ.get(TOKEN_VARIABLE, "")
        if not text:
            return ""
    token = text.strip()
    if not (token.isascii() and token.isprintable() and len(token) >= TOKEN_CHARS_MIN):
        raise ConfigError(
            f"the dashboard's token is not {TOKEN_CHARS_MIN} characters of ASCII or more",
            advice="make one with: openssl rand -hex 16",
        )
    return token


class Site:
    """What stands at which path."""

    def __init__(self, watcher: Watcher, access: Access) -> None:
        self._watcher = watcher
        self._access = access
        self._files = _page_files()

    def answer(self, request: Request) -> Answer:
        """The answer to a request. May wait for `STATE_WAIT_S`."""
        refusal = self._access.refusal(request)
        if refusal is not None:
            return refusal
        match request.path:
            case "/state":
                after = _number(request.query.get("after", "0"))
                if after is None:
                    return Answer(b"after is no number\n", status=HTTPStatus.BAD_REQUEST)
                return Answer(self._watcher.state(int(after), STATE_WAIT_S), _JSON)
            case "/datasets":
                return Answer(self._watcher.datasets(), _JSON)
            case "/history":
                since_s = _number(request.query.get("since", "0"))
                if since_s is None:
                    return Answer(b"since is no number\n", status=HTTPStatus.BAD_REQUEST)
                found = self._watcher.history(request.query.get("of", ""), since_s)
                if found is not None:
                    return Answer(found, _JSON)
            case path if path in self._files:
                return self._files[path]
        return Answer(b"there is no such page\n", status=HTTPStatus.NOT_FOUND)


def _page_files() -> Mapping[str, Answer]:
    """The files of the page, by their paths."""
    found = {}
    for each in (files("dlcmd.dashboard") / "page").iterdir():
        kind = _KINDS.get(each.name, _SCRIPT if each.name.endswith(".js") else "")
        if kind:
            found[f"/{each.name}"] = Answer(each.read_bytes(), kind)
    return {"/": found["/index.html"], **found}


def _number(text: str) -> float | None:
    """A finite number that is not negative; None for another text."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
