"""`python -m tests.storage.objects.moto_program`: moto's server, in which one PUT runs at a time.

S3 checks the condition of a request ("only if there is no such object") and stores the object in
one step. Moto does it in two, so that of two putters at once both may succeed.
"""

import sys
from contextlib import nullcontext
from threading import Lock

from moto import server
from moto.moto_server.werkzeug_app import DomainDispatcherApplication

_put = Lock()
_answer = DomainDispatcherApplication.__call__


def _one_put_at_a_time(
    app: DomainDispatcherApplication, environ: dict[str, object], start_response: object
) -> object:
    with _put if environ["REQUEST_METHOD"] == "PUT" else nullcontext():
        return _answer(app, environ, start_response)


if __name__ == "__main__":
    DomainDispatcherApplication.__call__ = _one_put_at_a_time  # type: ignore[assignment,method-assign]  # a wrapper of it
    server.main(sys.argv[1:])
