"""The public surface is what the documents say: names, verbs, options, exit codes, modules, links.

The documents are README.md and `cli/dlcmd/README.md`; the program's own tables are the other side.
"""

import re
import signal
from itertools import takewhile
from pathlib import Path

import click

import diesel_fs
from diesel_fs import errors
from dlcmd import main
from tests.cli.test_program import commands

from .test_errors import all_kinds
from .test_layers import modules

TREE = Path(__file__).resolve().parents[1]
README = (TREE / "README.md").read_text(encoding="utf-8")
REFERENCE = (TREE / "cli/dlcmd/README.md").read_text(encoding="utf-8")

OPTION = re.compile(r"(?<![\w-])--?[\w][\w-]*")
CODE = re.compile(r"`([^`]*)`")


def rows(text: str, section: str) -> list[list[str]]:
    """The cells of the table in a section, without its head."""
    body = re.split(r"^## ", text, flags=re.MULTILINE)
    table = next(part for part in body if part.startswith(f"{section}\n"))
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    split = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines[2:]]
    return [[cell.strip().replace("\\|", "|") for cell in cells] for cells in split]


def words_of(cell: str) -> str:
    """The words by which a verb is called, out of the cell that shows its use."""
    return " ".join(takewhile(str.islower, CODE.findall(cell)[0].split()))


def options_of(command: click.Command) -> set[str]:
    """All options of a command."""
    context = command.make_context(command.name, [], resilient_parsing=True)
    names = {name for each in command.get_params(context) for name in each.opts}
    return {name for name in names if name.startswith("-")}


SHARED = options_of(main.program)
"""The options that may stand before or after any verb."""


def test_all_that_is_public_resolves() -> None:
    assert sorted(set(diesel_fs.__all__)) == sorted(diesel_fs.__all__) == sorted(dir(diesel_fs))
    for name in diesel_fs.__all__:
        assert getattr(diesel_fs, name) is not None
    assert not hasattr(diesel_fs, "no_such_name")
    scope: dict[str, object] = {}
    exec("from diesel_fs import *", scope)  # noqa: S102
    assert set(diesel_fs.__all__) <= set(scope)


def test_every_verb_and_its_options_are_documented() -> None:
    """Exactly those: an option that is gone has to leave the page, too."""
    documented = {
        words_of(verb): set(OPTION.findall(options))
        for verb, options, _ in rows(REFERENCE, "Verbs")
    }
    assert documented == {
        name: options_of(command) - SHARED for name, command in commands().items()
    }


def test_the_words_that_an_option_takes_are_documented() -> None:
    cells = {words_of(row[0]): row[1] for row in rows(REFERENCE, "Verbs")}
    choices = [
        (name, parameter.opts[0], parameter.type.choices)
        for name, command in commands().items()
        for parameter in command.params
        if isinstance(parameter.type, click.Choice)
    ]
    assert len(choices) >= 3
    for name, option, words in choices:
        assert f"`{option} {'|'.join(words)}`" in cells[name]


def test_the_options_of_all_verbs_are_documented() -> None:
    below = REFERENCE.partition("Before or after any verb:")[2].partition("\n## ")[0]
    assert set(OPTION.findall(below)) == SHARED
    for command in commands().values():
        assert options_of(command) >= SHARED


def test_every_exit_code_is_documented() -> None:
    failures = {kind.exit_code for kind in all_kinds() if kind.__module__ == errors.__name__}
    signals = {main.INTERRUPTED, main.READER_GONE, 128 + signal.SIGTERM, 128 + signal.SIGHUP}
    ends = {0, errors.DieselError.exit_code} | failures | signals
    assert [int(code) for code, _ in rows(REFERENCE, "Exit codes")] == sorted(ends)


def test_the_map_names_every_module() -> None:
    """And none that is not there; a package stands for its modules."""
    table = README.partition("| layer |")[2].partition("\n\n")[0]
    named = {name.rstrip("/") for name in CODE.findall(table)} - {"diesel_fs"}
    there = {name.split(".")[1] if "." in name else name for name in modules()} - {"diesel_fs"}
    programs = {"dlcmd", "diesel_server"}
    ours = {name.split(".")[1] for name in modules() if name.startswith("diesel_fs.")}
    assert programs <= there
    assert named == ours | programs


def test_links_lead_somewhere_and_targets_exist() -> None:
    for page in (TREE / "README.md", TREE / "cli/dlcmd/README.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), (page, target)
    makefile = (TREE / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:`|^ *)make ([a-z]+)", README, re.MULTILINE))
    assert {"demo", "test", "install", "lint", "bench"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
