"""The verb `dashboard`."""

import os
import threading
from contextlib import suppress
from pathlib import Path

from diesel_fs.errors import ConfigError
from diesel_fs.net.endpoints import is_local, listen, parse_endpoint
from diesel_fs.settings import private_bytes
from diesel_fs.urls import HostPort

from ..args.options import file_path, global_flags, option, verb
from ..dashboard.access import TOKEN_CHARS_MIN, Access
from ..dashboard.datasets import WatchedDatasets
from ..dashboard.servers import WatchedServer, parse_metrics_place
from ..dashboard.site import SECURITY_HEADERS, Site
from ..dashboard.watcher import Watcher
from ..dashboard.web import WebServer
from ..show.output import print_result

DEFAULT_LISTEN = "127.0.0.1:9320"
TOKEN_VARIABLE = "DIESEL_DASHBOARD_TOKEN"  # noqa: S105  # the name of a variable
TOKEN_BYTES_MAX = 4096


@verb("dashboard")
@option(
    "--listen", "place", metavar="[HOST:]PORT", default=DEFAULT_LISTEN, show_default=True,
    help="Address at which the page is served. One that other machines can reach needs a token."
    " Port 0 is any free one.",
)  # fmt: skip
@option(
    "--server-metrics", "servers", metavar="[HOST:]PORT|URL", multiple=True,
    help="Show this server, too: give the value of its option --metrics. Repeatable.",
)  # fmt: skip
@option(
    "--token-file", type=file_path, metavar="FILE",
    help=f"A file with the token that pages must know.  [or env: {TOKEN_VARIABLE}]",
)  # fmt: skip
def dashboard(place: str, servers: tuple[str, ...], token_file: Path | None) -> None:
    """Show mounts, tasks, servers and datasets live, as a page in the browser.

    The page shows all your mounts on this machine, also later ones, their tasks, the datasets of
    the repository (--url), and the servers that you name: the causes of waits, the sources of
    reads, and the progress of each rank in its plan, over the last hour. It changes nothing, and
    works without the internet.

    Without a token only this machine can reach the page. From another one, use `ssh -L
    9320:localhost:9320 HOST`; or give a token of at least 16 characters, and open
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
    sources = [WatchedServer(f"server-{i + 1}", *each) for i, each in enumerate(places)]
    watcher = Watcher(sources, WatchedDatasets(settings))
    site = Site(watcher, Access(token, {wanted.host}))
    web = WebServer(sockets, site.answer, SECURITY_HEADERS)
    threading.Thread(target=web.serve, name="web", daemon=True).start()
    url = f"http://{at}/"
    print_result({"url": url}, f"the dashboard is at {url}" + ("?token=..." if token else ""))
    with suppress(KeyboardInterrupt):
        watcher.run()


def _read_token(file: Path | None) -> str:
    """Returns "" without a token. Raises ConfigError."""
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
