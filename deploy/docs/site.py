"""Builds the documentation site (`make docs`): `python -m deploy.docs.site MKDOCS`.

The pages are the Markdown files of the tree at their own places, so that links between them work,
and two generated ones. A link to a source file leads to a copy of it; a link to a folder becomes
plain text. mkdocs fails at a dead link or anchor (`strict` in mkdocs.yaml).
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import click

import diesel_fs
import diesel_fs.torch
from dlcmd.main import program

TREE = Path(__file__).parents[2]
PAGES = TREE / "build/docs/pages"

_LINK = re.compile(r"(?<!\!)\[([^\]]*)\]\((?!https?:)([^)#\s]+)\)")
"""Links with an anchor lead to pages, so they do not match."""


def gather(pages: Path) -> None:
    shutil.rmtree(pages, ignore_errors=True)
    for page in _tracked("*.md"):
        text = (TREE / page).read_text(encoding="utf-8")
        _write(pages / page, _LINK.sub(partial(_link, pages, page), text))
    for image in _tracked("*.png"):
        _copy(image, pages / image)
    _write(pages / "reference/commands.md", "\n".join(_commands()))
    _write(pages / "reference/python.md", "\n".join(_interface()))


def _tracked(pattern: str) -> list[Path]:
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", pattern]
    found = subprocess.run(listing, cwd=TREE, check=True, capture_output=True, text=True).stdout
    return [Path(name) for name in sorted(found.split("\0")) if name]


def _write(place: Path, text: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text, encoding="utf-8")


def _copy(file: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(TREE / file, place)


def _link(pages: Path, page: Path, link: "re.Match[str]") -> str:
    """If the link leads to a source file, this file is copied."""
    text, target = link.groups()
    there = (TREE / page.parent / target).resolve()
    if there.is_dir():
        return text
    if there.suffix in (".md", ".png"):
        return link[0]
    file = there.relative_to(TREE)
    _copy(file, pages / f"{file}.txt")  # a browser would offer to save a .py, and shows a .txt
    return f"[{text}]({target}.txt)"


def _commands() -> Iterator[str]:
    yield from ("# Help of each command", "", "The output of `--help`.", "")
    for context in _contexts(_context(program, "dlcmd", None)):
        text = context.command.get_help(context)
        yield from (f"## {context.command_path}", "", "```text", text, "```", "")


def _context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    return click.Context(command, parent, name, **command.context_settings)


def _contexts(context: click.Context) -> Iterator[click.Context]:
    yield context
    if isinstance(group := context.command, click.Group):
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            yield from _contexts(_context(command, name, context))


def _interface() -> Iterator[str]:
    yield from ("# Python", "")
    for package in (diesel_fs, diesel_fs.torch):
        for name in package.__all__:
            yield from (f"::: {package.__name__}.{name}", "")


def main(mkdocs: str) -> int:
    gather(PAGES)
    command = [
        mkdocs,
        "build",
        "--quiet",
        "--config-file",
        str(Path(__file__).with_name("mkdocs.yaml")),
    ]
    quiet = {"NO_MKDOCS_2_WARNING": "1"}  # Material advertises its successor
    return subprocess.run(command, check=False, env={**os.environ, **quiet}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
