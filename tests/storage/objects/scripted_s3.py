"""A small S3 server for tests, with answers that fail by a script.

    with ScriptedS3(Rule("GET", "chunks/", status=503, times=2)) as server:
        store = CloudStore.create(server.url, ...)

It answers correct requests as S3 does, as far as `CloudStore` uses it.

Concurrency: a thread per connection, one lock around the objects and the script.
"""

import hashlib
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.storage.objects.fault_script import FaultScript, PlannedFault

BUCKET = "bucket"
STALL_S = 60.0  # longer than any test waits; the end of the server ends it

_CODES = {
    400: "InvalidRequest",
    403: "AccessDenied",
    404: "NoSuchKey",
    409: "ConditionalRequestConflict",
    412: "PreconditionFailed",
    416: "InvalidRange",
    429: "TooManyRequests",
    500: "InternalError",
    501: "NotImplemented",
    502: "BadGateway",
    503: "SlowDown",
}


@dataclass(slots=True)
class Rule(PlannedFault):
    """A fault of the next requests of the method `operation` with `where` in their path and query.

    In this order: `act` is called; with `reset` the connection is torn down before the request
    has an effect; the server answers `status` (with `code`, `headers`) instead of carrying the
    request out, or, with `done`, after it; `ignore` leaves out that header of the request;
    `edit` changes the body of the answer, `flip` that bit of it; after `keep` bytes of the body
    the connection is reset, closed, or stalls, or continues at one byte each 50 ms.
    """

    act: Callable[["ScriptedS3"], None] | None = None
    reset: bool = False
    status: int = 0
    code: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    done: bool = False
    ignore: str = ""
    edit: Callable[[str], str] | None = None
    flip: int | None = None
    keep: int | None = None
    then: Literal["reset", "close", "stall", "dribble"] = "reset"


@dataclass(frozen=True)
class Stored:
    content: bytes
    modified_s: float

    @cached_property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.content, usedforsecurity=False).hexdigest()}"'


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    method: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes


@dataclass(slots=True)
class ScriptedAnswer:
    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class ScriptedS3(FaultScript[Rule]):
    def __init__(
        self, *script: Rule, page_keys: int = 1000, address: tuple[str, int] = ("127.0.0.1", 0)
    ) -> None:
        super().__init__(*script)
        self.page_keys = page_keys
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, str] = {}  # key by upload ID
        self.parts: dict[tuple[str, int], bytes] = {}  # by upload and number
        self.requests: list[RecordedRequest] = []
        self.busiest = 0  # the most requests that waited for an answer simultaneously
        self.delay_s = 0.0
        self.bytes_per_s = 0.0  # of all bodies to one address together; 0: no limit
        self.stopped = threading.Event()
        self._busy = 0
        self._sent_s: dict[str, float] = {}  # by address: the end of sending all bytes until now
        self._lock = threading.Lock()
        self._server = _Listener(address, _Handler)
        self._server.owner = self
        self.port = self._server.server_address[1]
        self.endpoint = f"http://{address[0]}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.stop()
        super().__exit__(kind, error, trace)

    def stop(self) -> None:
        """End all connections. May be called repeatedly."""
        if not self.stopped.is_set():
            self.stopped.set()
            self._server.shutdown()
            self._server.end_connections()
            self._server.server_close()
            self._thread.join(10)

    def put(self, key: str, content: bytes) -> None:
        self.objects[key] = Stored(content, time.time())

    def count(self, method: str, where: str = "") -> int:
        return sum(each.method == method and where in each.key for each in self.requests)

    def enter(self, request: RecordedRequest) -> None:
        with self._lock:
            self.requests.append(request)
            self._busy += 1
            self.busiest = max(self.busiest, self._busy)

    def leave(self) -> None:
        with self._lock:
            self._busy -= 1

    def wait_to_send(self, size: int, address: str) -> None:
        """Wait until the rate allows a body of this size to that address."""
        if self.bytes_per_s:
            with self._lock:
                begin_s = max(self._sent_s.get(address, 0.0), time.monotonic())
                self._sent_s[address] = end_s = begin_s + size / self.bytes_per_s
            self.stopped.wait(max(end_s - time.monotonic(), 0))

    def answer(self, request: RecordedRequest) -> ScriptedAnswer:
        if request.key == "" and request.method in ("GET", "HEAD"):
            if "uploads" in request.query:
                return ScriptedAnswer(200, self._list_uploads(request.query).encode())
            return ScriptedAnswer(200, self._list(request.query).encode())
        with self._lock:
            match request.method:
                case "POST" if "uploads" in request.query or "uploadId" in request.query:
                    return self._upload(request)
                case "PUT" if "uploadId" in request.query:
                    return self._put_part(request)
                case "PUT":
                    return self._put(request)
                case "GET" | "HEAD":
                    return self._get(request)
                case "DELETE" if "uploadId" in request.query:
                    known = self.uploads.pop(request.query["uploadId"], None)
                    return ScriptedAnswer(204) if known else problem(404, "NoSuchUpload")
                case "DELETE":
                    self.objects.pop(request.key, None)
                    return ScriptedAnswer(204)
        return problem(501)

    def _put(self, request: RecordedRequest) -> ScriptedAnswer:
        signed = request.headers.get("x-amz-content-sha256", "UNSIGNED-PAYLOAD")
        if signed not in ("UNSIGNED-PAYLOAD", hashlib.sha256(request.body).hexdigest()):
            return problem(400, "XAmzContentSHA256Mismatch")
        if request.headers.get("if-none-match") == "*" and request.key in self.objects:
            return problem(412)
        stored = Stored(request.body, time.time())
        self.objects[request.key] = stored
        return ScriptedAnswer(200, headers={"ETag": stored.etag})

    def _upload(self, request: RecordedRequest) -> ScriptedAnswer:
        if "uploads" in request.query:
            number = f"upload-{len(self.requests)}"
            self.uploads[number] = request.key
            begun = f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId>"
            return ScriptedAnswer(200, f"{begun}</InitiateMultipartUploadResult>".encode())
        number = request.query["uploadId"]
        if self.uploads.pop(number, None) is None:
            return problem(404, "NoSuchUpload")
        numbers = map(int, re.findall(rb"<PartNumber>(\d+)</PartNumber>", request.body))
        stored = Stored(b"".join(self.parts.pop((number, each)) for each in numbers), time.time())
        self.objects[request.key] = stored
        ended = f"<CompleteMultipartUploadResult><ETag>{escape(stored.etag)}</ETag>"
        return ScriptedAnswer(200, f"{ended}</CompleteMultipartUploadResult>".encode())

    def _put_part(self, request: RecordedRequest) -> ScriptedAnswer:
        number = request.query["uploadId"]
        if number not in self.uploads:
            return problem(404, "NoSuchUpload")
        self.parts[number, int(request.query["partNumber"])] = request.body
        return ScriptedAnswer(200, headers={"ETag": Stored(request.body, 0.0).etag})

    def _get(self, request: RecordedRequest) -> ScriptedAnswer:
        stored = self.objects.get(request.key)
        if stored is None:
            return problem(404)
        if request.headers.get("if-match", stored.etag) != stored.etag:
            return problem(412)
        content, status = stored.content, 200
        headers = {"ETag": stored.etag, "Last-Modified": formatdate(stored.modified_s, usegmt=True)}
        if wanted := request.headers.get("range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or 1 << 62), len(content) - 1)
            if start > end:
                return problem(416)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            content, status = content[start : end + 1], 206
        return ScriptedAnswer(status, content, headers)

    def _list(self, query: Mapping[str, str]) -> str:
        after = max(query.get("start-after", ""), query.get("continuation-token", ""))
        with self._lock:
            keys = sorted(
                (k for k in self.objects if k.startswith(query.get("prefix", "")) and k > after),
                key=str.encode,
            )
            page = keys[: min(self.page_keys, int(query.get("max-keys", "1000")))]
            shown = "".join(
                f"<Contents><Key>{escape(key)}</Key>"
                f"<LastModified>{_iso(self.objects[key].modified_s)}</LastModified>"
                f"<ETag>{escape(self.objects[key].etag)}</ETag>"
                f"<Size>{len(self.objects[key].content)}</Size></Contents>"
                for key in page
            )
        more = len(page) < len(keys)
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        return (
            f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>"
            f"<KeyCount>{len(page)}</KeyCount>{token}{shown}</ListBucketResult>"
        )

    def _list_uploads(self, query: Mapping[str, str]) -> str:
        prefix = query.get("prefix", "")
        shown = "".join(
            f"<Upload><Key>{escape(key)}</Key><UploadId>{upload}</UploadId>"
            f"<Initiated>{_iso(0)}</Initiated></Upload>"
            for upload, key in self.uploads.items()
            if key.startswith(prefix)
        )
        return (
            "<ListMultipartUploadsResult><IsTruncated>false</IsTruncated>"
            f"{shown}</ListMultipartUploadsResult>"
        )


def problem(status: int, code: str = "", **headers: str) -> ScriptedAnswer:
    code = code or _CODES.get(status, "Unknown")
    text = f"<Error><Code>{code}</Code><Message>scripted</Message></Error>"
    return ScriptedAnswer(status, text.encode(), headers)


def _iso(at_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(at_s))


class _Listener(ThreadingHTTPServer):
    owner: ScriptedS3
    daemon_threads = True
    block_on_close = False
    request_queue_size = 512

    def __init__(self, address: tuple[str, int], handler: "type[_Handler]") -> None:
        self._open: set[socket.socket] = set()
        super().__init__(address, handler)

    def note(self, connection: socket.socket, *, is_open: bool) -> None:
        (self._open.add if is_open else self._open.discard)(connection)

    def end_connections(self) -> None:
        for connection in [*self._open]:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: most tests here break connections on purpose."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: _Listener

    def setup(self) -> None:
        super().setup()
        self.server.note(self.connection, is_open=True)

    def finish(self) -> None:
        self.server.note(self.connection, is_open=False)
        super().finish()

    def log_message(self, *args: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        owner = self.server.owner
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        query = {name: values[0] for name, values in parse_qs(url.query, True).items()}
        length = int(self.headers.get("Content-Length", "0"))
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = RecordedRequest(self.command, key, query, headers, self.rfile.read(length))
        owner.enter(request)
        try:
            rule = owner.next_fault(self.command, unquote(self.path))
            if owner.delay_s:
                time.sleep(owner.delay_s)
        finally:
            owner.leave()  # before the answer: afterwards the client may send its next
        self._serve(owner, request, bucket, rule or Rule(""))
        self.wfile.flush()

    do_HEAD = do_PUT = do_DELETE = do_POST = do_GET

    def _serve(self, owner: ScriptedS3, request: RecordedRequest, bucket: str, rule: Rule) -> None:
        if rule.act is not None:
            rule.act(owner)
        headers = {name: text for name, text in request.headers.items() if name != rule.ignore}
        answer = problem(rule.status, rule.code)
        if bucket != BUCKET:
            answer = problem(404, "NoSuchBucket")
        elif rule.done or not (rule.reset or rule.status):
            done = owner.answer(replace(request, headers=headers))
            answer = answer if rule.status else done
        if rule.reset:
            self._reset()
            return
        answer.headers.update(rule.headers)
        self._send(owner, answer, rule)

    def _send(self, owner: ScriptedS3, answer: ScriptedAnswer, rule: Rule) -> None:
        body = answer.body
        owner.wait_to_send(len(body), self.client_address[0])
        if rule.edit is not None:
            body = rule.edit(body.decode()).encode()
        if rule.flip is not None:
            changed = bytearray(body)
            changed[rule.flip // 8] ^= 1 << rule.flip % 8
            body = bytes(changed)
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD" or answer.status in (204, 304):
            return
        if rule.keep is None:
            self.wfile.write(body)
            return
        self.wfile.write(body[: rule.keep])
        self.wfile.flush()
        match rule.then:
            case "reset":
                self._reset()
            case "close":
                self.close_connection = True
            case "stall":
                owner.stopped.wait(STALL_S)
                self.close_connection = True
            case "dribble":
                for byte in body[rule.keep :]:
                    self.wfile.write(bytes([byte]))
                    self.wfile.flush()
                    if owner.stopped.wait(0.05):
                        break

    def _reset(self) -> None:
        time.sleep(0.02)  # without it the kernel drops the bytes before the RST
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True
