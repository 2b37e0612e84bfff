"""What a handler of requests is given, and what it gives back."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from diesel_fs.format.entries import Bytes
from diesel_fs.net.messages import Message
from diesel_fs.storage.accounts.account import Account


@dataclass(frozen=True, slots=True)
class Request:
    """One request: its head, its payload (in memory of its own), and who asks from where."""

    message: Message
    payload: memoryview
    account: Account
    peer: str
    secured: bool = False  # it came by TLS


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer: its head without `id`, and the payload's parts, which are sent one by one."""

    message: Message = field(default_factory=dict)
    payload: Sequence[Bytes] = ()


Handler = (
    Callable[[Request], Reply]
    | Callable[[Request], Iterator[Reply]]
    | Callable[[Request], Awaitable[Reply]]
    | Callable[[Request], AsyncIterator[Reply]]
)
"""A plain function runs in a thread and may block; a generator, too: each of its replies but the
last has `more`, and leaves once the one after it is there; one whose message has `more` itself (as
progress does) leaves at once, and another must follow. An `async` one runs in the loop, and must
not block it. Errors are DieselError; any other is a bug, which is logged and answered without its
words."""
