"""TLS between masters: S3 and S4. A process between two masters is detected."""

import ssl
import tempfile
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio

from diesel_fs.net.frames import NO_BINDING
from diesel_fs.net.tls import client_context, make_certificate
from diesel_fs.peers import wire
from diesel_fs.peers.wire import GIVEN, Hello
from tests.rows import each_row

from .connected_masters import (
    FakeAnswers,
    answering,
    asking,
    lines,
    listening,
    me,
    open_raw,
    read,
    run,
    wait_for,
)

SMALL = (0, 4096, 4096)
MINE, THEIRS, BETWEEN = make_certificate(), make_certificate(), make_certificate()


@pytest.mark.parametrize("known", [True, False])
def test_masters_talk_over_TLS(known: bool) -> None:
    """With a registered digest, and with `--peers`, where only the proofs are bound to the
    certificate."""

    async def main() -> None:
        async with answering(me(1, THEIRS)) as node:
            digest = THEIRS.digest if known else b""
            async with asking(node.port, me(0, MINE), digest) as peer:
                for records in ([SMALL], [(2, i * 9000, 8000) for i in range(200)],
                                [(2, 0, 6 << 20)], [(3, 0, 40 << 20)]):  # fmt: skip
                    statuses, _ = await read(peer, *records)
                    assert statuses == [GIVEN] * len(records)
                assert await peer.ping()

    run(main)


def test_many_at_once_over_TLS() -> None:
    async def main() -> None:
        answers = FakeAnswers()
        answers.ready = wait_for(0.002)
        async with (
            answering(me(1, THEIRS), answers) as node,
            asking(node.port, me(0, MINE), THEIRS.digest) as peer,
        ):

            async def work(number: int) -> None:
                for i in range(20):
                    answers.hot = (number + i) % 3 > 0
                    size = 3 << 20 if (number + i) % 17 == 0 else 5000 * (1 + i)
                    statuses, _ = await read(peer, (2, number * 1000, size))
                    assert statuses == [GIVEN]

            async with trio.open_nursery() as nursery:
                for number in range(12):
                    nursery.start_soon(work, number)
            assert peer.stats()["failed"] == 0

    run(main)


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

    with listening() as listener:
        listener.setblocking(False)
        accepting = trio.SocketListener(trio.socket.from_stdlib_socket(listener))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, one, [accepting])
            yield listener.getsockname()[1], heard
            nursery.cancel_scope.cancel()


@each_row("known", [True, False])
@each_row("to_tls", [True, False])
def test_S3_S4_another_certificate_is_refused(
    known: bool, to_tls: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the first byte, where the digest is registered; else by the proofs, which a process in
    the middle cannot make."""

    async def main() -> None:
        theirs = me(1, THEIRS if to_tls else None)
        async with answering(theirs) as node, between(node.port, to_tls=to_tls) as (port, heard):
            async with asking(port, me(0, MINE), THEIRS.digest if known else b"") as peer:
                assert (await read(peer, SMALL))[0] != [GIVEN]
                with trio.move_on_after(2):
                    while peer.stats()["state"] == "closed":
                        await read(peer, SMALL)
                        await trio.sleep(0.01)
                assert peer.stats()["state"] == "open"
            assert node.acceptor.stats()["accepted"] == 0
            assert node.acceptor.stats()["requests"] == 0
            if known:
                assert not heard

    run(main)
    if known:
        assert any("certificate is not the registered one" in line for line in caplog.messages)
    else:
        assert any("the wrong secret" in line for line in caplog.messages)


def test_S3_TLS_cannot_be_downgraded_to_plaintext() -> None:
    """No master speaks without TLS to one whose certificate is registered, or when it has a
    certificate itself."""

    async def main() -> None:
        async with answering(me(1)) as node:
            for digest in (THEIRS.digest, b""):
                async with asking(node.port, me(0, MINE), digest) as peer:
                    await read(peer, SMALL)
                    assert peer.stats()["connected"] is False
            async with asking(node.port, me(0), THEIRS.digest) as peer:
                await read(peer, SMALL)
                assert peer.stats()["connected"] is False
            assert node.acceptor.stats()["accepted"] == 0
        async with answering(me(1, THEIRS)) as node, asking(node.port, me(0)) as peer:
            await read(peer, SMALL)
            assert peer.stats()["connected"] is False

    run(main)


def test_F7_plaintext_at_a_TLS_port_gets_one_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with answering(me(1, THEIRS)) as node:
            raw_peer = await open_raw(node.port)
            await raw_peer.send(wire.greeting())
            with trio.fail_after(5):
                assert b"DIESPER" not in await raw_peer.receive_all()

    run(main)
    assert len(lines(caplog.messages)) == 1


def test_S3_old_TLS_is_refused() -> None:
    async def main() -> None:
        async with answering(me(1, THEIRS)) as node:
            context = client_context()
            context.set_ciphers("ALL:@SECLEVEL=0")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it is old is what this is about
                context.minimum_version = ssl.TLSVersion.TLSv1
                context.maximum_version = ssl.TLSVersion.TLSv1_1
            with pytest.raises(trio.BrokenResourceError):
                await (await open_raw(node.port, context)).send(b"x")

    run(main)


def test_S3_a_proof_is_bound_to_the_certificate() -> None:
    """A connector that has the secret, but has seen another certificate, is not let in."""

    async def main() -> None:
        async with answering(me(1, THEIRS)) as node:
            for binding, good in ((THEIRS.digest, True), (BETWEEN.digest, False),
                                  (NO_BINDING, False)):  # fmt: skip
                raw_peer = await open_raw(node.port, client_context())
                assert ("proof" in await raw_peer.handshake(me(0), binding=binding)) is good

    run(main)


def test_keys_are_new_each_time_and_in_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert len({make_certificate().digest for _ in range(3)}) == 3
    assert list(tmp_path.rglob("*")) == []
    assert "context" not in repr(MINE)
    assert Hello(0, False, bytes(16), 1, me(0).identity, 3, bytes(32)).rank == 0
