"""Warnings and advice that the operator gets when a server starts."""

import os
import socket
from functools import partial
from pathlib import Path

import pytest

from diesel_fs.errors import ObjectMissing, ObjectStoreError
from diesel_fs.storage.objects.cloud import store as cloud
from diesel_fs.storage.objects.cloud.direct import open_buckets_directly
from diesel_fs.storage.objects.retry import RetryPolicy
from diesel_fs.urls import parse_url
from diesel_server.options import checked
from diesel_server.wiring import _objects
from tests.storage.objects.s3_server import credentials

from .certificates import Authority


def warnings(certificate: Path, key: Path) -> list[str]:
    return checked(
        store="file:///none", meta=None, listen="127.0.0.1:0", tls_cert=str(certificate),
        tls_key=str(key), workers=1, cache_dir=None, cache_size=None, metrics=None, insecure=False,
    )[1]  # fmt: skip


def test_S14_a_key_that_all_users_can_read_gives_a_warning(tmp_path: Path) -> None:
    pair = Authority(tmp_path).issue()
    for mode, count in ((0o644, 1), (0o602, 1), (0o600, 0), (0o640, 0)):
        pair.key.chmod(mode)
        assert len(warnings(pair.certificate, pair.key)) == count
    assert warnings(pair.certificate, tmp_path / "none") == []


def test_only_for_a_missing_store_the_advice_is_to_create_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not answer is there, for all that is known."""
    (tmp_path / "store").mkdir()
    with pytest.raises(ObjectMissing) as missing:
        _objects(parse_url((tmp_path / "store").as_uri()))
    assert "user add" in missing.value.advice
    monkeypatch.setattr(cloud, "RetryPolicy", partial(RetryPolicy, deadline_s=0.0))  # no retries
    open_buckets_directly()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for name in [name for name in os.environ if "proxy" in name.lower()]:
            monkeypatch.delenv(name)
        for name, text in credentials(endpoint).items():
            monkeypatch.setenv(name, text)
        with pytest.raises(ObjectStoreError, match="refused") as away:
            _objects(parse_url("s3://bucket/x?meta=redis://127.0.0.1:1"))
    assert "user add" not in away.value.advice
