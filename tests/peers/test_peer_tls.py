"""TLS between masters: S3 and S4. A process between two masters is detected."""

import ssl
import tempfile
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import trio

from diesel_fs.net.frames import NO_BINDING
from diesel_fs.net.tls import client_context, make_certificate
from diesel_fs.peers import wire
from diesel_fs.peers.wire import GIVEN
from tests.rows import each_row

from .connected_masters import (
    SMALL,
    FakeAnswers,
    Node,
    answering,
    asking,
    gather,
    lines,
    me,
    open_raw,
    read,
    wait_for,
)

MINE, THEIRS, BETWEEN = make_certificate(), make_certificate(), make_certificate()


@pytest.fixture
async def secure(answers: FakeAnswers) -> AsyncIterator[Node]:
    async with answering(me(1, THEIRS), answers) as node:
        yield node


@each_row("digest", [THEIRS.digest, b""])
async def test_masters_talk_over_TLS(digest: bytes, secure: Node) -> None:
    """With a registered digest, and with `--peers`, where only the proofs are bound to the
    certificate."""
    secure.answers.hold()
    secure.answers.ready = wait_for(0.002)
    async with asking(secure.port, me(0, MINE), digest) as peer:
        for records in ([SMALL], [(2, i * 9000, 8000) for i in range(200)],
                        [(2, 0, 6 << 20)], [(3, 0, 40 << 20)]):  # fmt: skip
            assert await read(peer, *records) == [GIVEN] * len(records)
        assert await peer.ping()

        async def work(number: int) -> None:
            for i in range(20):
                secure.answers.hold(hot=(number + i) % 3 > 0)
                size = 3 << 20 if (number + i) % 17 == 0 else 5000 * (1 + i)
                assert await read(peer, (2, number * 1000, size)) == [GIVEN]

        await gather(*(partial(work, number) for number in range(12)))
        assert peer.stats()["failed"] == 0


@asynccontextmanager
async def between(port: int, *, to_tls: bool) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A process in the middle: it speaks TLS with a certificate of its own and forwards what it
    receives."""
    heard: list[bytes] = []

    async def pass_on(source: trio.abc.Stream, target: trio.abc.Stream) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while some := await source.receive_some(65536):
                heard.append(bytes(some))
                await target.send_all(some)

    async def one(stream: trio.SocketStream) -> None:
        hither = trio.SSLStream(stream, BETWEEN.context, server_side=True)
        thither = await open_raw(port, client_context() if to_tls else None)
        async with stream, trio.open_nursery() as nursery:
            nursery.start_soon(pass_on, hither, thither.stream)
            await pass_on(thither.stream, hither)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio.serve_tcp, one, 0, host="127.0.0.1"))
        yield listener.socket.getsockname()[1], heard
        nursery.cancel_scope.cancel()


@each_row("known", [True, False])
@each_row("to_tls", [True, False])
async def test_S3_S4_another_certificate_is_refused(
    known: bool, to_tls: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the first byte, where the digest is registered; else by the proofs, which a process in
    the middle cannot make."""
    theirs = me(1, THEIRS if to_tls else None)
    async with answering(theirs) as node, between(node.port, to_tls=to_tls) as (port, heard):
        async with asking(port, me(0, MINE), THEIRS.digest if known else b"") as peer:
            assert await read(peer, SMALL) != [GIVEN]
            with trio.move_on_after(2):
                while peer.stats()["state"] == "closed":
                    await read(peer, SMALL)
                    await trio.sleep(0.01)
            assert peer.stats()["state"] == "open"
        assert node.acceptor.stats()["accepted"] == 0
        assert node.acceptor.stats()["requests"] == 0
        assert not (known and heard)
    why = "certificate is not the registered one" if known else "the wrong secret"
    assert any(why in line for line in caplog.messages)


async def test_S3_TLS_cannot_be_downgraded_to_plaintext(node: Node, secure: Node) -> None:
    """No master speaks without TLS to one whose certificate is registered, or when it has a
    certificate itself."""
    for there, mine, digest in (
        (node, me(0, MINE), THEIRS.digest),
        (node, me(0, MINE), b""),
        (node, me(0), THEIRS.digest),
        (secure, me(0), b""),
    ):
        async with asking(there.port, mine, digest) as peer:
            await read(peer, SMALL)
            assert peer.stats()["connected"] is False
    assert node.acceptor.stats()["accepted"] == 0


async def test_S3_F7_plaintext_and_old_TLS_are_refused(
    secure: Node, caplog: pytest.LogCaptureFixture
) -> None:
    raw_peer = await open_raw(secure.port)
    await raw_peer.send(wire.greeting())
    with trio.fail_after(5):
        assert b"DIESPER" not in await raw_peer.receive_all()
    assert len(lines(caplog.messages)) == 1
    context = client_context()
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is old is what this is about
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(trio.BrokenResourceError):
        await (await open_raw(secure.port, context)).send(b"x")


async def test_S3_a_proof_is_bound_to_the_certificate(secure: Node) -> None:
    """A connector that has the secret, but has seen another certificate, is not let in."""
    for binding in (THEIRS.digest, BETWEEN.digest, NO_BINDING):
        raw_peer = await open_raw(secure.port, client_context())
        told = await raw_peer.handshake(me(0), binding=binding)
        assert ("proof" in told) is (binding == THEIRS.digest)


def test_keys_are_new_each_time_and_in_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert len({make_certificate().digest for _ in range(3)}) == 3
    assert list(tmp_path.rglob("*")) == []
    assert "context" not in repr(MINE)
