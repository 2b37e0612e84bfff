"""Tests of the program as a whole: global options, help, errors, start-up."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import click
import pytest

import diesel_fs
from diesel_fs.errors import BusyError
from dlcmd import main, verbs
from tests.rows import each_row
from tests.trees import write

from .conftest import Dlcmd, program_environment

pytestmark = pytest.mark.real_start


def commands() -> dict[str, click.Command]:
    context = click.Context(main.program)
    found = {name: main.program.get_command(context, name) for name in main.VERBS}
    whole = dict[str, click.Command]()
    for name, command in found.items():
        if isinstance(command, click.Group):
            whole |= {f"{name} {word}": each for word, each in command.commands.items()}
        elif command is not None:
            whole[name] = command
    return whole


def test_global_options_stand_before_or_after_the_verb(dlcmd: Dlcmd, tmp_path: Path) -> None:
    other = (tmp_path / "other").as_uri()
    source = write(tmp_path / "src", {"a": b""})
    dlcmd("--url", other, "put", source, "pets")
    listed = dlcmd("ls", "--url", other, "--json").objects
    assert dlcmd("--json", "--url", other, "ls").objects == listed
    dlcmd("--url", "file:///nowhere", "ls", "--url", other)
    assert dlcmd("-q", "put", source, "cars").out == dlcmd("put", "-q", source, "cars").out == b""
    version = f"dlcmd, version {diesel_fs.__version__}\n".encode()
    assert dlcmd("--version").out == dlcmd("ls", "--version").out == version


def test_options_and_environment_override_the_configuration_file(
    dlcmd: Dlcmd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config/diesel/config.toml"
    file.parent.mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    file.write_text('url = "file:///nowhere"\n')
    dlcmd("put", write(tmp_path / "src", {"a": b""}), "pets")
    assert dlcmd("ls").out == b"pets\n"
    monkeypatch.delenv("DIESEL_URL")
    assert "file:///nowhere" in dlcmd("ls", code=13).err
    file.write_text('color = "red"\n')
    assert "unknown key 'color'" in dlcmd("ls", code=2).err


def test_a_missing_repository_or_user_is_an_error_with_advice(dlcmd: Dlcmd, tmp_path: Path) -> None:
    for words in (["ls"], ["cat", "a/b"], ["verify", "a"], ["get", "a", "x"], ["rm", "a/b"]):
        result = dlcmd(*words, code=13)
        assert "there is no repository at file://" in result.err
        assert "`dlcmd put` makes one" in result.err
    dlcmd.store.mkdir()
    assert "should be mounted there" in dlcmd("ls", code=13).err
    (dlcmd.store / "file").touch()
    dlcmd("put", write(tmp_path / "src", {"a": b""}), "pets", code=12)
    for words in (["ls"], ["user", "ls"]):
        errors = dlcmd("--url", "diesel://localhost:1", *words, code=2).err
        assert "diesel://localhost:1 is the address of a server, and no user is named" in errors
        assert "--user and --key-file" in errors


def test_an_error_is_one_line_and_with_json_an_object(dlcmd: Dlcmd, tmp_path: Path) -> None:
    dlcmd("put", write(tmp_path / "src", {"a": b""}), "pets")
    line, described = dlcmd("--json", "ls", "gone", code=10).err.splitlines()
    assert line.startswith("dlcmd: no dataset 'gone' in file://")
    found = json.loads(described)
    assert (found["error"], found["exit_code"]) == ("NoSuchDataset", 10)
    [line] = dlcmd("frobnicate", code=2).err.splitlines()
    assert "dlcmd --help" in line
    assert "dlcmd ls --help" in dlcmd("ls", "--bad", code=2).err
    _, described = dlcmd("ls", "--json", "--bad", code=2).err.splitlines()
    assert json.loads(described)["exit_code"] == 2


def test_without_a_verb_it_prints_its_help(dlcmd: Dlcmd) -> None:
    for words in ([], ["user"]):
        result = dlcmd(*words, code=2)
        assert result.out == b""
        assert result.err.startswith(" ".join(["Usage: dlcmd", *words]))
        assert result.err.strip() == dlcmd(*words, "--help").out.decode().strip()


@each_row(
    ("word", "meant"), [("list", "ls"), ("unmount", "umount"), ("mout", "mount"), ("remove", "rm")]
)
def test_an_unknown_verb_gets_a_suggestion(dlcmd: Dlcmd, word: str, meant: str) -> None:
    result = dlcmd("--json", word, "pets", code=2).err.splitlines()
    assert result[0] == f"dlcmd: unknown verb {word!r}; did you mean `dlcmd {meant}`?"
    assert json.loads(result[1])["exit_code"] == 2


def test_a_path_in_place_of_a_dataset_shows_the_order(dlcmd: Dlcmd, tmp_path: Path) -> None:
    source = write(tmp_path / "src", {"a": b""})
    swapped: dict[str, list[str | Path]] = {
        "put": ["pets", source], "mount": [source, "pets"], "ls": [source]
    }  # fmt: skip
    for verb, words in swapped.items():
        result = dlcmd(verb, *words, code=2).err
        assert f"'{source}' stands where the name of a dataset is expected" in result
        assert f"the order is: dlcmd {verb} " in result
        assert "DATASET" in result
    assert not dlcmd.store.exists()


@each_row(
    ("error", "code", "words"),
    [
        (KeyError("x"), 1, "unexpected KeyError: 'x'; this is a bug; -v shows where"),
        (MemoryError(), 1, "unexpected MemoryError"),
        (BusyError("held", advice="wait"), 11, "held; wait"),
        (OSError(28, "No space left on device", "/x"), 16, "/x: No space left on device"),
        (PermissionError(13, "Permission denied", b"/\xff"), 12, "Permission denied"),
        (KeyboardInterrupt(), 130, "interrupted; run it again to finish"),
    ],
)
def test_an_exception_becomes_one_line_and_an_exit_code(
    dlcmd: Dlcmd, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, words: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("diesel_fs.repository.local.LocalRepository.open", fail)
    result = dlcmd("ls", code=code)
    assert result.err.startswith(f"dlcmd: {words}") or words in result.err
    assert len(result.err.splitlines()) == 1


def test_tracebacks_of_bugs(dlcmd: Dlcmd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dlcmd("put", write(tmp_path / "src", {"a": b"1"}), "pets")
    for words, code in (
        (["ls", "nowhere"], 10),
        (["cat", "pets/nowhere"], 10),
        (["ls", "@"], 2),
        (["--url", "file:///nonexistent", "ls"], 13),
    ):
        for given in (["-v", *words], [*words, "-v"]):
            assert "Traceback" not in dlcmd.program(*given, code=code).err
    result = dlcmd("-v", "load-meta", "/nonexistent", code=10).err.splitlines()
    assert result[1].startswith("  | after FileNotFoundError: ")
    assert len(result) == 2
    assert len(dlcmd("load-meta", "/nonexistent", code=10).err.splitlines()) == 1

    def bug(_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("diesel_fs.repository.local.LocalRepository.datasets", bug)
    with pytest.raises(AssertionError, match="Traceback"):  # this fixture passes it to no verb
        dlcmd("-v", "ls", code=1)
    assert "unexpected KeyError" in dlcmd("ls", code=1).err


@each_row("name", sorted({*main.VERBS, *commands()}))
def test_help_has_examples_and_the_global_options(dlcmd: Dlcmd, name: str) -> None:
    result = dlcmd(*name.split(), "--help").out.decode()
    assert f"dlcmd {name} " in result.partition("Example")[2]
    for option in ("--url", "--user", "--key-file", "--json", "-q", "-v", "--version"):
        assert option in result
    assert name.split()[0] in dlcmd("--help").out.decode()


def test_the_table_of_verbs_names_each_command() -> None:
    """Synonyms are no verbs, and mean verbs."""
    found = commands()
    assert list(dict.fromkeys(name.split()[0] for name in found)) == list(main.VERBS)
    assert [command.name for command in found.values()] == [name.split()[-1] for name in found]
    assert not main.SYNONYMS.keys() & main.VERBS.keys()
    assert {*main.SYNONYMS.values()} <= main.VERBS.keys()


def test_the_recipe_for_a_verb_makes_one(
    dlcmd: Dlcmd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[2].joinpath("CONTRIBUTING.md").read_text(encoding="utf-8")
    recipe = page.partition("### a verb of `dlcmd`")[2].partition("\n### ")[0]
    module, line = map(dedent, re.findall(r"^ +```python\n(.*?)^ +```", recipe, re.M | re.S))
    [(name, text)] = ast.literal_eval(f"{{{line}}}").items()
    monkeypatch.setitem(main.VERBS, name, text)
    (tmp_path / f"{name}.py").write_text(module)
    monkeypatch.setattr(verbs, "__path__", [*verbs.__path__, str(tmp_path)])
    dlcmd("put", write(tmp_path / "src", {"a": b"1", "b/c": b"2"}), "pets")
    assert dlcmd(name, "pets").out == b"pets has 2 files\n"
    assert dlcmd(name, "pets", "--json").objects == [{"dataset": "pets", "files": 2}]
    assert f"dlcmd {name} " in dlcmd(name, "--help").out.decode()
    assert f"`cli/dlcmd/verbs/`; both have the verb's name, here `{name}`" in recipe
    monkeypatch.delitem(sys.modules, f"dlcmd.verbs.{name}")


def test_every_option_is_explained_by_a_sentence() -> None:
    for name, command in commands().items():
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                sentence = re.sub(r"( +\[[^]]+\])$", "", parameter.help or "")
                assert re.fullmatch(r"[A-Z].{9,}\.", sentence), (name, parameter.opts)


def test_start_up_imports_little() -> None:
    """`dlcmd --version` and `mount` must not wait for imports that they do not need."""
    code = """if True:
        import sys
        import dlcmd.main, dlcmd.verbs.mount
        slow = {"numpy", "rich", "trio", "pyfuse3", "sqlite3", "multiprocessing", "asyncio"}
        found = slow & set(sys.modules)
        sys.exit(str(found) if found else 0)
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def by_shell(script: str, folder: Path, *words: str | Path) -> "subprocess.CompletedProcess[str]":
    dlcmd = shlex.join([sys.executable, "-m", "dlcmd", *map(str, words)])
    return subprocess.run(
        ["sh", "-c", script.replace("$dlcmd", f"exec {dlcmd}")], cwd=folder,
        env=program_environment(), check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_a_closed_stdout_is_an_error_of_one_line(dlcmd: Dlcmd, tmp_path: Path) -> None:
    source = write(tmp_path / "src", {"a": b"1"})
    for closed in (">&-", ">&- 2>&-"):
        done = by_shell(f"$dlcmd {closed}", tmp_path, "-q", "put", source, "pets")
        assert done.returncode == 0
    assert dlcmd("ls", "pets").out == b"a\n"
    for words in (["ls"], ["ls", "-l"], ["doctor", "--quick"], ["get", "pets", "--tar", "-"]):
        done = by_shell("$dlcmd >&-", tmp_path, *words)
        assert (done.returncode, done.stderr) == (1, "dlcmd: standard output is closed\n"), words


def test_a_current_folder_that_has_been_removed_is_named(tmp_path: Path) -> None:
    done = by_shell("mkdir gone; cd gone; rmdir ../gone; $dlcmd", tmp_path, "stats", "x")
    assert done.returncode == 10
    assert "the current folder has been removed; go to another one" in done.stderr


def test_a_url_names_a_folder_of_any_bytes(dlcmd: Dlcmd, tmp_path: Path) -> None:
    url = f"{tmp_path.as_uri()}/%23%c3%a9%3f"
    dlcmd("--url", url, "put", write(tmp_path / "src", {"a": b""}), "pets")
    assert os.path.isdir(os.fsencode(tmp_path) + b"/#\xc3\xa9?/datasets")
    assert dlcmd("--url", url, "ls").out == b"pets\n"
    for bad in ("file:///data#2", "file:///data#", "file://[x", "file:///a%00b", "file:///%ff"):
        result = dlcmd("--url", bad, "ls", code=2)
        assert "bad repository URL" in result.err
        assert "bug" not in result.err


def test_a_user_without_a_home_can_use_a_named_repository(
    dlcmd: Dlcmd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may have no HOME, and a user ID without an entry in /etc/passwd."""
    source = write(tmp_path / "src", {"a": b"1"})
    for variable in ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    dlcmd("ls", code=13)
    dlcmd("put", source, "pets")
    assert dlcmd("cat", "pets/a").out == b"1"
    monkeypatch.delenv("DIESEL_URL")
    assert "set XDG_DATA_HOME" in dlcmd("ls", code=2).err
