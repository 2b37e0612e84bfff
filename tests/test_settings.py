"""Settings and files with secrets. N9: a configuration file is only data: unknown keys and wrong
types are errors, and nothing in it is expanded."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from diesel_fs.credentials import Credentials, key_text
from diesel_fs.errors import ConfigError, PermissionDenied
from diesel_fs.peers.members.options import read_key_file
from diesel_fs.settings import KEY_FILE_BYTES_MAX, Settings, load_settings
from diesel_fs.storage.metadata.redis.address import parse_redis_url

from .cli.conftest import Dlcmd as Dlcmd
from .cli.conftest import dlcmd as dlcmd
from .rows import each_row
from .small_disks import remount, small_disk
from .unprivileged_user import needs_root


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "config/diesel").mkdir(parents=True)
    return tmp_path / "config/diesel/config.toml"


def test_flags_win_over_the_environment_and_that_over_the_file(config: Path) -> None:
    assert load_settings({}, {}) == Settings()
    config.write_text('url = "file:///file"\nuser = "file"\nkey_file = "/file"\n')
    assert load_settings({}, {}) == Settings("file:///file", "file", "/file")
    environment = {"DIESEL_URL": "file:///environment", "DIESEL_USER": ""}
    assert load_settings({"url": None}, environment) == Settings(
        "file:///environment", "file", "/file"
    )
    flags = {"url": "file:///flag", "user": None, "key_file": "/flag"}
    assert load_settings(flags, environment) == Settings("file:///flag", "file", "/flag")


@each_row("key", ["Url", "urls", "key", "repository-url", '""', '"url "', "__class__"])
def test_N9_unknown_keys_are_errors(config: Path, key: str) -> None:
    """The error names no value: it may be a misplaced secret."""
    config.write_text(f'url = "file:///x"\n{key} = "hush-hush"\n')
    with pytest.raises(ConfigError) as refused:
        load_settings({}, {})
    assert "unknown key" in str(refused.value)
    assert "key_file" in refused.value.advice
    assert str(config) in str(refused.value)
    assert "hush" not in str(refused.value)


@each_row("table", ["[diesel]\nurl = 'x'", "[[url]]\na = 1", "url.a = 'x'"])
def test_N9_tables_are_errors(config: Path, table: str) -> None:
    config.write_text(f"{table}\n")
    with pytest.raises(ConfigError):
        load_settings({}, {})


@each_row("value", ["1", "1.5", "true", "nan", "2026-01-01", "['file:///x']", "{ a = 'x' }", "[]"])
@each_row("key", ["url", "user", "key_file"])
def test_N9_wrong_types_are_errors(config: Path, key: str, value: str) -> None:
    config.write_text(f"{key} = {value}\n")
    with pytest.raises(ConfigError, match=f"{key} must be a string"):
        load_settings({}, {})


@each_row(
    "data",
    [
        b"url",
        b"url = ",
        b"url = file:///x",
        b'url = "a"\nurl = "b"\n',
        b'{"url": "file:///x"}',
        b"url = 'a\0'",
        b"\x7fELF\0",
        b"url = '\xff'",
        b"\xff\xfeu\0r\0l\0",
        b"url = " + b"[" * 100_000,
    ],
)
def test_N9_bytes_that_are_not_toml_are_an_error(config: Path, data: bytes) -> None:
    config.write_bytes(data)
    with pytest.raises(ConfigError, match="cannot read"):
        load_settings({}, {})


def test_N9_nothing_is_expanded(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hush")
    for text in ("$SECRET", "${SECRET}", "~/x", "`id`", "$(id)", "{SECRET}", "%(SECRET)s", "!id"):
        config.write_text(f"url = '{text}'\nuser = '{text}'\nkey_file = '{text}'\n")
        assert load_settings({}, {}) == Settings(text, text, text)


def test_N9_a_file_that_cannot_be_read_is_an_error(config: Path) -> None:
    config.mkdir()
    with pytest.raises(ConfigError, match="Is a directory"):
        load_settings({}, {})
    config.rmdir()
    config.symlink_to(config)
    with pytest.raises(ConfigError, match="symbolic links"):
        load_settings({}, {})
    config.unlink()
    config.symlink_to(config.with_name("gone"))
    assert load_settings({}, {}) == Settings()


def test_N9_a_relative_folder_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the owner of the working directory would choose the repository."""
    (tmp_path / "here/diesel").mkdir(parents=True)
    (tmp_path / "here/diesel/config.toml").write_text('url = "file:///evil"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", "here")
    assert load_settings({}, {}) == Settings()


def test_N9_every_verb_reports_it_in_one_line(config: Path, dlcmd: Dlcmd, tmp_path: Path) -> None:
    config.write_text("url = 1\n")
    for words in (["ls"], ["put", tmp_path, "ds"], ["verify", "ds"], ["mount", "ds", tmp_path]):
        said = dlcmd(*words, code=2)
        assert said.err == f"dlcmd: {config}: url must be a string\n"
    assert not os.path.lexists(dlcmd.store)


def test_a_bad_key_file_is_refused_and_its_content_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "key"
    settings = Settings("diesel://server", "ann", str(file))
    with pytest.raises(ConfigError, match="cannot read the key"):
        _ = settings.credentials
    key = key_text(bytes(range(32)))
    file.write_text(f"{key}\n")
    file.chmod(0o640)
    with pytest.raises(PermissionDenied, match="others may read the key"):
        _ = settings.credentials
    file.chmod(0o600)
    assert settings.credentials == Credentials("ann", bytes(range(32)))
    for content, words in (
        (f"{key}{' ' * KEY_FILE_BYTES_MAX}".encode(), "too long for the key"),
        (b"\xff" + key.encode(), "holds no key"),
        (b"hush-hush", "holds no key"),
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=words) as refused:
            _ = settings.credentials
        assert "hush" not in str(refused.value)


def _account_key(path: Path) -> str:
    flags = {"url": "diesel://h", "user": "me", "key_file": str(path)}
    found = load_settings(flags, {}).credentials
    assert found is not None
    return found.key_text


def _redis_password(path: Path) -> str:
    return parse_redis_url("redis://h", {"DIESEL_REDIS_PASSWORD_FILE": str(path)}).password


SECRET = key_text(bytes(range(32)))
SECRET_FILES = {"key": _account_key, "task's key": read_key_file, "Redis password": _redis_password}


@each_row("mode", [0o644, 0o640, 0o602])
@each_row("kind", SECRET_FILES)
def test_a_secret_that_others_may_read_is_refused(tmp_path: Path, kind: str, mode: int) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    file.chmod(mode)
    read: Callable[[Path], str] = SECRET_FILES[kind]
    with pytest.raises(PermissionDenied, match="others may read") as refused:
        read(file)
    assert refused.value.advice == f"chmod 600 {file}"
    file.chmod(0o600)
    assert read(file) == SECRET


@needs_root
@each_row("kind", SECRET_FILES)
def test_a_secret_that_a_container_engine_mounts_is_warned_of_once(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is read-only, with a mode that no process in the container can change."""
    with small_disk(tmp_path / "secrets", "size=1M") as folder:
        file = folder / "secret"
        file.write_text(f"{SECRET}\n")
        file.chmod(0o444)
        remount(folder, "ro")
        with caplog.at_level(logging.WARNING):
            assert [SECRET_FILES[kind](file) for _ in range(2)] == [SECRET] * 2
        [said] = caplog.messages
        assert "others may read" in said
        assert str(file) in said
        assert SECRET not in said
