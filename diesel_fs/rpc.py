"""The client's end of the wire (`WIRE.md`): connections to the servers at an address."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol
from uuid import UUID

from .messages import Message
from .storage.objects import Bytes


class Answer(NamedTuple):
    """One answer: its head, and its payload in memory of its own (or in the `room` of the call)."""

    message: Message
    payload: memoryview


class Calls(Protocol):
    """Requests to a server and their answers; from many threads at once, in forked children."""

    @property
    def store_id(self) -> UUID:
        """The object store behind the server. Connects where that has not been done."""
        ...

    def call(
        self,
        message: Message,
        payload: Sequence[Bytes] = (),
        *,
        room: memoryview | None = None,
        again: bool = True,
        deadline_s: float | None = None,
    ) -> Answer:
        """The answer to a request (`message` without `id`).

        `room` takes the payload, which must fit it exactly. `again`: where a connection breaks, it
        may be sent once more, to another address where there is one. Raises the error that the
        answer is; MetadataError where no server can be reached, DeadlineError, CorruptError for an
        answer that contradicts the wire.
        """
        ...

    def stream(self, message: Message, *, deadline_s: float | None = None) -> Iterator[Answer]:
        """All answers to a request, the last too; the deadline is for each. Raises as `call`."""
        ...

    def close(self) -> None:
        """End all connections. Repeatable."""
        ...
