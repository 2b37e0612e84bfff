"""The program as a whole: options, help, errors, start-up."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

import diesel_fs
from diesel_fs.errors import BusyError
from dlcmd import main
from tests.trees import write

from .conftest import Dlcmd


def commands() -> dict[str, click.Command]:
    """All that can be said, by its words."""
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
    assert (
        dlcmd("ls", "--url", other, "--json").objects
        == dlcmd("--json", "--url", other, "ls").objects
    )
    dlcmd("--url", "file:///nowhere", "ls", "--url", other)
    assert dlcmd("-q", "put", source, "cars").out == dlcmd("put", "-q", source, "cars").out == b""
    version = f"dlcmd, version {diesel_fs.__version__}\n".encode()
    assert dlcmd("--version").out == dlcmd("ls", "--version").out == version


def test_the_configuration_counts_least(
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


def test_where_there_is_no_repository_it_says_what_to_do(dlcmd: Dlcmd, tmp_path: Path) -> None:
    for words in (["ls"], ["cat", "a/b"], ["verify", "a"], ["get", "a", "x"], ["rm", "a/b"]):
        said = dlcmd(*words, code=13)
        assert "there is no repository at file://" in said.err
        assert "`dlcmd put` makes one" in said.err
    dlcmd.store.mkdir()
    assert "should be mounted there" in dlcmd("ls", code=13).err
    (dlcmd.store / "file").touch()
    dlcmd("put", write(tmp_path / "src", {"a": b""}), "pets", code=12)


def test_errors_are_one_line_and_an_object(dlcmd: Dlcmd, tmp_path: Path) -> None:
    dlcmd("put", write(tmp_path / "src", {"a": b""}), "pets")
    line, described = dlcmd("--json", "ls", "gone", code=10).err.splitlines()
    assert line.startswith("dlcmd: no dataset 'gone' in file://")
    assert json.loads(described)["error"] == "NoSuchDataset"
    assert json.loads(described)["exit_code"] == 10
    assert len(dlcmd("frobnicate", code=2).err.splitlines()) == 1
    assert "dlcmd --help" in dlcmd("frobnicate", code=2).err
    assert "dlcmd ls --help" in dlcmd("ls", "--bad", code=2).err
    _, described = dlcmd("ls", "--json", "--bad", code=2).err.splitlines()
    assert json.loads(described)["exit_code"] == 2


def test_without_a_verb_it_prints_its_help(dlcmd: Dlcmd) -> None:
    """As a person sees it, on stderr: nothing was done."""
    for words in ([], ["user"]):
        said = dlcmd(*words, code=2)
        assert said.out == b""
        assert said.err.startswith(" ".join(["Usage: dlcmd", *words]))
        assert said.err.strip() == dlcmd(*words, "--help").out.decode().strip()


@pytest.mark.parametrize(
    ("word", "meant"),
    [("list", "ls"), ("unmount", "umount"), ("mout", "mount"), ("remove", "rm")],
)
def test_a_verb_that_there_is_not_leads_to_the_one_that_was_meant(
    dlcmd: Dlcmd, word: str, meant: str
) -> None:
    said = dlcmd("--json", word, "pets", code=2).err.splitlines()
    assert said[0] == f"dlcmd: unknown verb {word!r}; did you mean `dlcmd {meant}`?"
    assert json.loads(said[1])["exit_code"] == 2


def test_what_others_call_a_verb_is_none_of_ours() -> None:
    assert not main.SYNONYMS.keys() & main.VERBS.keys()
    assert {*main.SYNONYMS.values()} <= main.VERBS.keys()


def test_a_path_in_the_place_of_a_dataset_shows_the_order(dlcmd: Dlcmd, tmp_path: Path) -> None:
    source = write(tmp_path / "src", {"a": b""})
    swapped: dict[str, list[str | Path]] = {
        "put": ["pets", source], "mount": [source, "pets"], "ls": [source]
    }  # fmt: skip
    for verb, words in swapped.items():
        said = dlcmd(verb, *words, code=2).err
        assert f"'{source}' stands where the name of a dataset is expected" in said
        assert f"the order is: dlcmd {verb} " in said
        assert "DATASET" in said
    assert not dlcmd.store.exists()


ASK = """
eval "$(dlcmd completion bash)"
for line in "dlcmd mo" "dlcmd mount --pol" "dlcmd mount --policy " "dlcmd user e" "dlcmd lo"; do
    IFS=' ' read -ra COMP_WORDS <<<"$line"
    [ "${line% }" = "$line" ] || COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    COMPREPLY=()
    _dlcmd_completion dlcmd
    echo "$line: ${COMPREPLY[*]}"
done
"""


def test_a_shell_completes_verbs_options_and_values(dlcmd: Dlcmd, tmp_path: Path) -> None:
    """In a real bash; for the others the text that they evaluate is there."""
    program = Path(sys.executable).with_name("dlcmd")
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", ASK], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "dlcmd mo: mount", "dlcmd mount --pol: --policy",
        "dlcmd mount --policy : on-demand oneshot", "dlcmd user e: export", "dlcmd lo: load-meta",
    ]  # fmt: skip
    assert b"compdef _dlcmd_completion dlcmd" in dlcmd("completion", "zsh").out
    assert b"complete --no-files --command dlcmd" in dlcmd("completion", "fish").out
    dlcmd("completion", "tcsh", code=2)


@pytest.mark.parametrize(
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
def test_a_traceback_is_a_bug(
    dlcmd: Dlcmd,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    words: str,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("dlcmd.addresses.LocalRepository.open", fail)
    said = dlcmd("ls", code=code)
    assert said.err.startswith(f"dlcmd: {words}") or words in said.err
    assert len(said.err.splitlines()) == 1


def test_a_server_without_a_user_is_not_said_to_be_there(dlcmd: Dlcmd) -> None:
    for words in (["ls"], ["user", "ls"]):
        said = dlcmd("--url", "diesel://localhost:1", *words, code=2).err
        assert "diesel://localhost:1 is the address of a server, and no user is named" in said
        assert "--user and --key-file" in said


def test_verbose_shows_where_only_a_bug_is(
    dlcmd: Dlcmd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that says all has no traceback, but what led to it."""
    dlcmd("put", write(tmp_path / "src", {"a": b"1"}), "pets")
    for words, code in (
        (["ls", "nowhere"], 10),
        (["cat", "pets/nowhere"], 10),
        (["ls", "@"], 2),
        (["--url", "file:///nonexistent", "ls"], 13),
    ):
        for given in (["-v", *words], [*words, "-v"]):
            assert "Traceback" not in dlcmd.program(*given, code=code).err
    said = dlcmd("-v", "load-meta", "/nonexistent", code=10).err.splitlines()
    assert said[1].startswith("  | after FileNotFoundError: ")
    assert len(said) == 2
    assert len(dlcmd("load-meta", "/nonexistent", code=10).err.splitlines()) == 1

    def bug(_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("dlcmd.listing.LocalRepository.datasets", bug)
    with pytest.raises(AssertionError, match="Traceback"):  # which this fixture lets no verb say
        dlcmd("-v", "ls", code=1)
    assert "unexpected KeyError" in dlcmd("ls", code=1).err


@pytest.mark.parametrize("name", sorted({*main.VERBS, *commands()}))
def test_help_teaches(dlcmd: Dlcmd, name: str) -> None:
    said = dlcmd(*name.split(), "--help").out.decode()
    assert f"dlcmd {name} " in said.partition("Example")[2]
    for option in ("--url", "--user", "--key-file", "--json", "-q", "-v", "--version"):
        assert option in said
    assert name.split()[0] in dlcmd("--help").out.decode()


def test_the_table_of_verbs_holds() -> None:
    """Each verb is where the table says, and is called so."""
    found = commands()
    assert list(dict.fromkeys(name.split()[0] for name in found)) == list(main.VERBS)
    assert {name: command.name for name, command in found.items()} == {
        name: name.split()[-1] for name in found
    }


def test_every_option_is_explained_by_a_sentence() -> None:
    """Behind which the default may stand."""
    for name, command in commands().items():
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                sentence = re.sub(r"( +\[[^]]+\])$", "", parameter.help or "")
                assert re.fullmatch(r"[A-Z].{9,}\.", sentence), (name, parameter.opts)


def test_start_up_imports_little() -> None:
    """`dlcmd --version` and `mount` are not to wait for what they do not need."""
    code = """if True:
        import sys
        import dlcmd.main, dlcmd.mounting
        slow = {"numpy", "rich", "trio", "pyfuse3", "sqlite3", "multiprocessing", "asyncio"}
        found = slow & set(sys.modules)
        sys.exit(str(found) if found else 0)
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_it_runs_where_stdout_is_closed(dlcmd: Dlcmd, tmp_path: Path) -> None:
    source = write(tmp_path / "src", {"a": b"1"})
    for closed in (">&-", ">&- 2>&-"):
        command = f'exec "$0" -m dlcmd -q put "$1" pets {closed}'
        done = subprocess.run(["sh", "-c", command, sys.executable, source], check=False)
        assert done.returncode == 0
    assert dlcmd("ls", "pets").out == b"a\n"


@pytest.mark.parametrize(
    "url", ["file:///data#2", "file:///data#", "file://[x", "file:///a%00b", "file:///%ff"]
)
def test_a_url_that_means_something_else_is_refused(dlcmd: Dlcmd, url: str) -> None:
    said = dlcmd("--url", url, "ls", code=2)
    assert "bad repository URL" in said.err
    assert "bug" not in said.err


def test_a_url_names_any_folder(dlcmd: Dlcmd, tmp_path: Path) -> None:
    url = f"{tmp_path.as_uri()}/%23%c3%a9%3f"
    dlcmd("--url", url, "put", write(tmp_path / "src", {"a": b""}), "pets")
    assert os.path.isdir(os.fsencode(tmp_path) + b"/#\xc3\xa9?/datasets")
    assert dlcmd("--url", url, "ls").out == b"pets\n"


def test_a_user_without_a_home_needs_none(
    dlcmd: Dlcmd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container: no HOME, and a user ID that is in no list."""
    source = write(tmp_path / "src", {"a": b"1"})
    for variable in ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    dlcmd("ls", code=13)
    dlcmd("put", source, "pets")
    assert dlcmd("cat", "pets/a").out == b"1"
    monkeypatch.delenv("DIESEL_URL")
    assert "set XDG_DATA_HOME" in dlcmd("ls", code=2).err
