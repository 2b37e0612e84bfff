"""Decides which requests the dashboard answers: those of this machine, or those with the token.

Without a token, a request must name this machine in its header Host. Otherwise a foreign page with
a name that leads to 127.0.0.1 ("DNS rebinding") could read the dashboard in the user's browser.
With a token, every request must have it: as `Authorization: Bearer TOKEN`, or in a cookie that
`?token=TOKEN` has set, which holds a value made from the token.
"""

import hashlib
import hmac
from collections.abc import Collection
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie

from diesel_fs.urls import HostPort

from .web import HttpAnswer, HttpRequest

COOKIE = "diesel_dashboard"
TOKEN_CHARS_MIN = 16
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

_TOKEN_NEEDED = b"""This dashboard needs its token. Open it once as

    http://HOST:PORT/?token=TOKEN

and this browser is remembered; programs send `Authorization: Bearer TOKEN`.
"""


class Access:
    def __init__(self, token: str, hosts: Collection[str]) -> None:
        """Without a token, a request may name `hosts` or a local name in its header Host."""
        self._token = token.encode()
        self._hosts = frozenset(each.lower() for each in hosts) | LOCAL_NAMES
        self._cookie = hmac.new(self._token, b"diesel dashboard cookie", hashlib.sha256).hexdigest()

    def refusal(self, request: HttpRequest) -> HttpAnswer | None:
        """Returns None if the request is allowed, otherwise an error, or a redirect that sets the
        cookie."""
        if not self._token:
            if self._is_local_name(request.headers.get("host", "")):
                return None
            text = b"This dashboard answers only to a name of this machine.\n"
            return HttpAnswer(text, status=HTTPStatus.MISDIRECTED_REQUEST)
        given = request.query.get("token")
        if given is not None and self._is_token(given):
            cookie = f"{COOKIE}={self._cookie}; Path=/; HttpOnly; SameSite=Strict"
            headers = {"Set-Cookie": cookie, "Location": "/"}
            return HttpAnswer(status=HTTPStatus.SEE_OTHER, headers=headers)
        kind, _, bearer = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self._is_token(bearer.strip()):
            return None
        if _same(self._cookie.encode(), _cookie(request).encode("utf-8", "replace")):
            return None
        headers = {"WWW-Authenticate": 'Bearer realm="dlcmd dashboard"'}
        return HttpAnswer(_TOKEN_NEEDED, status=HTTPStatus.UNAUTHORIZED, headers=headers)

    def _is_local_name(self, host: str) -> bool:
        try:
            return HostPort.parse(host, default_port=80).host.lower() in self._hosts
        except ValueError:
            return False

    def _is_token(self, given: str) -> bool:
        return _same(self._token, given.encode("utf-8", "replace"))


def _same(one: bytes, other: bytes) -> bool:
    return hmac.compare_digest(hashlib.sha256(one).digest(), hashlib.sha256(other).digest())


def _cookie(request: HttpRequest) -> str:
    try:
        morsel = SimpleCookie(request.headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return morsel.value if morsel else ""
