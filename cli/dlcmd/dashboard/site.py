"""The paths of the dashboard: its page, and the JSON that the page fetches."""

import math
from collections.abc import Mapping
from http import HTTPStatus
from importlib.resources import files

from .access import Access
from .watcher import Watcher
from .web import HttpAnswer, HttpRequest

STATE_WAIT_S = 5.0

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
"""The page may load nothing from other hosts, and run no inline script."""


class Site:
    def __init__(self, watcher: Watcher, access: Access) -> None:
        self._watcher = watcher
        self._access = access
        self._files = _page_files()

    def answer(self, request: HttpRequest) -> HttpAnswer:
        """Called in the connection's thread; may wait for `STATE_WAIT_S`."""
        refusal = self._access.refusal(request)
        if refusal is not None:
            return refusal
        match request.path:
            case "/state":
                after = _number(request.query.get("after", "0"))
                if after is None:
                    return HttpAnswer(b"after is no number\n", status=HTTPStatus.BAD_REQUEST)
                return HttpAnswer(self._watcher.state(int(after), STATE_WAIT_S), _JSON)
            case "/datasets":
                return HttpAnswer(self._watcher.datasets(), _JSON)
            case "/history":
                since_s = _number(request.query.get("since", "0"))
                if since_s is None:
                    return HttpAnswer(b"since is no number\n", status=HTTPStatus.BAD_REQUEST)
                found = self._watcher.history(request.query.get("of", ""), since_s)
                if found is not None:
                    return HttpAnswer(found, _JSON)
            case path if path in self._files:
                return self._files[path]
        return HttpAnswer(b"there is no such page\n", status=HTTPStatus.NOT_FOUND)


def _page_files() -> Mapping[str, HttpAnswer]:
    found = {}
    for each in (files(__package__) / "page").iterdir():
        kind = _KINDS.get(each.name, _SCRIPT if each.name.endswith(".js") else "")
        if kind:
            found[f"/{each.name}"] = HttpAnswer(each.read_bytes(), kind)
    return {"/": found["/index.html"], **found}


def _number(text: str) -> float | None:
    """Returns None for a negative or infinite number, too."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
