"""`python -m tests.mutation`: see its help."""

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import click
from coverage.exceptions import CoverageWarning

from .coverage_map import Batch, CoverageMap, batches, measure
from .mutants import PACKAGES, Mutant, draw
from .sandbox import end_all
from .verdicts import TIERS, Verdict, as_line, differences, in_order, judge, read_verdicts, table

HERE = Path(__file__).resolve().parents[2]

T = TypeVar("T")
R = TypeVar("R")

jobs_option = click.option("--jobs", default=2, show_default=True, help="So many at a time.")
tree_option = click.option(
    "--tree",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=HERE,
    help="Another checkout, with an environment in .venv, which has the tests to run.",
)
work_option = click.option(
    "--work", type=click.Path(path_type=Path), default=HERE / "build" / "mutation",
    help="The folder of all results; default: build/mutation.",
)  # fmt: skip


@click.group()
def main() -> None:
    """Measure how many small faults the tests find.

    \b
    python -m tests.mutation cover           # which test reaches which line: hours, once
    python -m tests.mutation plan --seed 37  # draws 200 mutants
    python -m tests.mutation run --tier all  # the whole suite on each of them: hours
    python -m tests.mutation run --tier fast
    python -m tests.mutation compare build/mutation/all.jsonl build/mutation/fast.jsonl

    Each step goes on where an earlier one was cut off. Leave the tree as it is while one runs, or
    give it a worktree of its own (--tree). It takes root, overlayfs and coverage.py.
    """
    if os.geteuid() != 0:
        raise click.ClickException("only root can make the copies in which tests run")
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _each(work: Callable[[T], R], things: Sequence[T], jobs: int) -> Iterator[tuple[T, R]]:
    """An interrupt ends the running ones."""
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(work, thing): thing for thing in things}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            end_all()
            raise


@main.command()
@click.argument("tests", nargs=-1)
@jobs_option
@tree_option
@work_option
def cover(tests: tuple[str, ...], jobs: int, tree: Path, work: Path) -> None:
    """Find out which lines TESTS (files or folders) reach, or those of the whole suite.

    What an earlier call has measured is not measured again: remove the folder `cover` for that.
    """
    tree, into = tree.resolve(), work / "cover"
    warnings.simplefilter("ignore", CoverageWarning)  # killed processes leave broken files
    found = batches(tree, into, list(tests))
    click.echo(f"{len(found)} batches to measure")

    def one(batch: Batch) -> str:
        lines = measure(tree, into, batch)
        failed = [line["ended"] for line in lines if line.get("outcome") == "failed"]
        seconds = sum(line.get("seconds", 0.0) for line in lines)
        finished = any("finished" in line for line in lines)
        return " ".join([f"{seconds:.0f} s", *([] if finished else ["CUT OFF"]), *failed])

    for batch, ending in _each(one, found, jobs):
        click.echo(f"{batch.name}: {ending}")


@main.command()
@click.option("--seed", default=37, show_default=True)
@click.option("--count", default=200, show_default=True, help="The least number of mutants.")
@click.option("--package", "packages", multiple=True, default=PACKAGES, help="Default: all seven.")
@tree_option
@work_option
def plan(seed: int, count: int, packages: tuple[str, ...], tree: Path, work: Path) -> None:
    """Draw mutants of covered lines, equal shares of each package; replaces an earlier plan."""
    drawn = draw(tree.resolve(), packages, count, seed, CoverageMap(work / "cover").covers)
    work.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{json.dumps(asdict(mutant))}\n" for mutant in drawn)
    (work / "plan.jsonl").write_text(text, encoding="utf-8")
    click.echo(f"{len(drawn)} mutants in {work / 'plan.jsonl'}")


@main.command()
@click.option("--tier", type=click.Choice(list(TIERS)), required=True)
@click.option("--seconds", default=120.0, show_default=True, help="The budget of a mutant.")
@jobs_option
@tree_option
@work_option
def run(tier: str, seconds: float, jobs: int, tree: Path, work: Path) -> None:
    """Run the tests of a tier on the mutants of the plan that have no verdict yet."""
    tree, results = tree.resolve(), work / f"{tier}.jsonl"
    text = (work / "plan.jsonl").read_text(encoding="utf-8")
    mutants = [Mutant(**json.loads(line)) for line in text.splitlines()]
    measured, known = CoverageMap(work / "cover"), read_verdicts(results)
    chosen = {each: in_order(each, measured) for each in mutants if each not in known}

    def one(mutant: Mutant) -> Verdict:
        return judge(tree, mutant, chosen[mutant], measured.seconds, tier, seconds)

    # Without the line that an interrupt may have cut off.
    results.write_text("".join(map(as_line, known.values())), encoding="utf-8")
    with results.open("a", encoding="utf-8") as file:
        for number, (_, verdict) in enumerate(_each(one, list(chosen), jobs), 1):
            file.write(as_line(verdict))
            file.flush()
            ending = f"{verdict.status} by {verdict.by}" if verdict.by else verdict.status
            click.echo(
                f"{number} of {len(chosen)}: {verdict.mutant}: {ending}, {verdict.seconds} s"
            )
            sys.stdout.flush()
    everyone = read_verdicts(results)
    click.echo(table(everyone[mutant] for mutant in mutants))


@main.command()
@click.argument("first", type=click.Path(path_type=Path, exists=True))
@click.argument("second", type=click.Path(path_type=Path, exists=True))
def compare(first: Path, second: Path) -> None:
    """Say which mutants one run killed and the other one did not."""
    before, after = read_verdicts(first), read_verdicts(second)
    lost, won, killed, kept = differences(before, after)
    for name, mutants, verdicts in ((first, lost, after), (second, won, before)):
        click.echo(f"killed by {name} alone: {len(mutants)}")
        for mutant in mutants:
            click.echo(f"  {mutant}  ({verdicts[mutant].status} elsewhere)")
    share = f", {100 * kept / killed:.1f} %" if killed else ""
    click.echo(f"{second} kills {kept} of the {killed} that {first} kills{share}")


main()
