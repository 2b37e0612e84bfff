"""The values of the options of all verbs: each one is read as its help describes, or refused with
the name of the option and an example, and nothing is done.
"""

import re
from pathlib import Path

import click
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.errors import UsageError
from dlcmd.args.options import duration, size
from dlcmd.verbs.forecast import rate
from tests.rows import each_row

from .conftest import Dlcmd
from .test_program import commands

WITH_VALUES = [
    (name, command, each)
    for name, command in commands().items()
    for each in command.params
    if isinstance(each, click.Option) and not each.is_flag
]
NUMBERS = (click.types.IntParamType, click.types.FloatParamType)
NO_NUMBERS = ["nan", "inf", "1e400", "١٢", "1_000", " 5", "5 ", "+5", "0x10", "5M", "9" * 30, "-"]
BY_FUNCTION = ["4 parrots", "nan", "-5M", "١٢", "1_000", " 5", "0x10", "9" * 30, "5\n"]
"""Values that none of our types of sizes, rates, durations, masks and users accepts."""


def taken(command: click.Command, option: click.Option, text: str) -> object:
    try:
        given = (text,) if option.multiple else text
        return option.type_cast_value(click.Context(command), given)
    except (UsageError, click.UsageError) as error:
        return error


def test_I13_each_option_refuses_other_types_of_values(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tried = set[str]()
    for name, command, option in WITH_VALUES:
        kind, bad = option.type, [""]
        if isinstance(kind, NUMBERS):
            bad += NO_NUMBERS
            tried.add("number")
        elif isinstance(kind, click.types.FuncParamType):
            bad += BY_FUNCTION
            tried.add(kind.name)
        elif isinstance(kind, click.Path):
            bad.append(str(tmp_path if not kind.dir_okay else tmp_path / "file"))
            tried.add("path")
        for text in bad:
            found = taken(command, option, text)
            where = (name, option.opts, text)
            if isinstance(found, UsageError):
                assert found.message.startswith(f"{max(option.opts, key=len)}: "), where
                assert found.advice, where
            else:
                assert isinstance(found, click.BadParameter), where
                assert found.param is option, where
    assert {"number", "path", "size", "rate", "duration", "time", "octal", "user_id"} <= tried


@given(
    st.text(max_size=12)
    | st.from_regex(r"[-+]?[0-9\u0660-\u0669_.eE]{1,6}[KMG%dhm]?", fullmatch=True)
)
def test_any_text_gives_a_value_or_a_refusal(text: str) -> None:
    for name, command, option in WITH_VALUES:
        if isinstance(option.type, click.Path) and "\0" in text:
            continue  # no argument of a program holds one
        found = taken(command, option, text)
        if isinstance(option.type, click.types.IntParamType) and isinstance(found, int):
            assert re.fullmatch("-?[0-9]+", text), (name, option.opts)


@each_row(
    ("read", "text", "value"),
    [
        (rate, "125M", 125 << 20),
        (rate, "1G/s", 1 << 30),
        (rate, "10Gbit", 1_250_000_000),
        (rate, "100Mbit/s", 12_500_000),
        (rate, "0", 0),
        (size, "4096", 4096),
        (size, "64k", 65_536),
        (size, "4MiB", 4 << 20),
        (duration, "0", 0),
        (duration, "90m", 5400),
        (duration, "7d", 604_800),
    ],
)
def test_examples_of_the_help_are_accepted(read: type[int], text: str, value: int) -> None:
    assert read(text) == value


@each_row(
    ("words", "message"),
    [
        (["mount", "pets", ""], "DIR is empty"),
        (["mount", "--memory", "", "pets", "mnt"], "--memory: its value is empty"),
        (["mount", "--seed", "9223372036854775808", "pets", "mnt"], "not in the range"),
        (["mount", "--cache-dir", ".", "--cache-size", "0", "pets", "mnt"], "leaves no room"),
        (["mount", "--cool-down", "1h", "pets", "mnt"], "none is named; say --cache-dir"),
        (["mount", "--cache-dir", ".", "--cool-down", "600", "pets", "mnt"], "write it as 0, 90m"),
        (["mount", "--cache-dir", ".", "--lrfu-p", "3", "pets", "mnt"], "say --evict lrfu"),
        (["mount", "--lrfu-p", "0.9", "pets", "mnt"], "'--lrfu-p': 0.9 is not in the range"),
        (["mount", "--lrfu-step", "1/24", "pets", "mnt"], "--lrfu-step: '1/24' is no number"),
        (["--url", "", "ls"], "--url: its value is empty"),
        (["ls", "--user", ""], "--user: its value is empty"),
        (["umount", ""], "DIR is empty"),
        (["put", "--jobs", "١٢", ".", "pets"], "--jobs: '١٢' is no whole number"),
        (["put", "--manifest", "", ".", "pets"], "--manifest: its value is empty"),
        (["put", "--files-from", ".", "src", "pets"], "'.' is a directory"),
        (
            ["forecast", "pets", "--network", "ten"],
            "--network: bad rate 'ten'; write bytes a second",
        ),
        (["top", "--interval", "nan", "mnt"], "--interval: 'nan' is no number; write it as 1"),
        (["run", "--group-size", "1_0", "true"], "--group-size: '1_0' is no whole number"),
        (["purge", "pets", "--grace", "1 day"], "--grace: bad length of time '1 day'; write it as"),
    ],
)
def test_a_bad_value_is_wrong_usage(dlcmd: Dlcmd, words: list[str], message: str) -> None:
    result = dlcmd(*words, code=2).err
    assert message in result
    assert len(result.splitlines()) == 1
    assert not dlcmd.store.exists()
