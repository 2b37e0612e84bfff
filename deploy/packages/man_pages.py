"""Man pages of the programs: the text of `--help`, written as roff."""

import inspect
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

import click

import diesel_fs


class _Roff(click.HelpFormatter):
    def __init__(self, name: str, section: int, summary: str, time_s: int) -> None:
        super().__init__()
        day = f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%d}"
        version = f"diesel-fs {diesel_fs.__version__}"
        self._name = name
        self.write(f'.TH "{_escaped(name.upper())}" "{section}" "{day}" "{version}" "DIESEL-FS"\n')
        self.write_heading("Name")
        self.write(f"{_escaped(name)} \\- {_escaped(summary)}\n")

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        self.write_heading("Synopsis")
        self.write(f"\\fB{_escaped(prog)}\\fR {_escaped(args)}\n")
        self.write_heading("Description")

    def write_heading(self, heading: str) -> None:
        self.write(f'.SH "{_escaped(re.sub(r" [(].*[)]$", "", heading)).upper()}"\n')

    def write_paragraph(self) -> None:
        """Does nothing: each part begins its own paragraphs."""

    def write_text(self, text: str) -> None:
        for number, paragraph in enumerate(re.split(r"\n\s*\n", inspect.cleandoc(text))):
            if number:
                self.write(".PP\n")
            if paragraph.startswith("\b\n"):
                self.write(f".nf\n{_lines(paragraph[2:])}.fi\n")
            else:
                self.write(_lines(" ".join(paragraph.split())))

    def write_dl(
        self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2
    ) -> None:
        for term, text in rows:
            self.write(f".TP\n\\fB{_escaped(term)}\\fR\n{_lines(' '.join(text.split()))}")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\(ga").replace('"', "\\(dq")


def _lines(text: str) -> str:
    """Text in backquotes becomes bold, and no line becomes a request of roff."""
    parts = re.split(r"`([^`]+)`", text)
    bold = "".join(
        f"\\fB{_escaped(part)}\\fR" if number % 2 else _escaped(part)
        for number, part in enumerate(parts)
    )
    lines = [
        f"\\&{line}" if line.startswith((".", "'", " ")) else line for line in bold.split("\n")
    ]
    return "".join(f"{line}\n" for line in lines)


def man_pages(program: click.Command, section: int, time_s: int) -> Iterator[tuple[str, str]]:
    """Yields name and text of each page: the program's own, and one for each verb, such as
    `dlcmd-put.1`. `time_s`, in seconds since 1970, is the time on the pages."""
    assert program.name is not None
    return _pages(program, _context(program, program.name, None), section, time_s)


def _context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    return click.Context(command, info_name=name, parent=parent, **command.context_settings)


def _summary(command: click.Command) -> str:
    text = command.get_short_help_str(limit=500).partition(". ")[0]
    return text.removesuffix(".").replace("`", "")


def _pages(
    command: click.Command, context: click.Context, section: int, time_s: int
) -> Iterator[tuple[str, str]]:
    name = context.command_path.replace(" ", "-")
    formatter = _Roff(name, section, _summary(command), time_s)
    with context.scope(cleanup=False):
        command.format_help(context, formatter)
    verbs = command.list_commands(context) if isinstance(command, click.Group) else []
    above = context.parent.command_path.replace(" ", "-") if context.parent else ""
    related = [*([above] if above else []), *(f"{name}-{verb}" for verb in verbs)]
    if related:
        formatter.write_heading("See also")
        formatter.write(
            ",\n".join(f"\\fB{_escaped(each)}\\fR({section})" for each in related) + "\n"
        )
    yield f"{name}.{section}", formatter.getvalue()
    for verb in verbs:
        assert isinstance(command, click.Group)
        found = command.get_command(context, verb)
        assert found is not None
        yield from _pages(found, _context(found, verb, context), section, time_s)
