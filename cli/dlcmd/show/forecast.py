"""Prints the result of `dlcmd forecast`: a sentence, a table and the commands to type; or JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from diesel_fs.forecast.kept import DISK, STORE
from diesel_fs.forecast.reads import ForecastFiles
from diesel_fs.forecast.report import (
    UNITS,
    ForecastOptions,
    commands,
    described,
    needs_no_cache,
    recommended,
)
from diesel_fs.forecast.simulate import Forecast

from ..args.options import global_flags
from .output import bytes_text, print_json, print_line, print_note, print_table

GIVEN = "given"

_COLUMNS = (
    *("order", "policy", "memory", "SSD", "peers", "store", "egress", "requests", "written"),
    *("first", "later", "stalled", "on time", "price"),
)


@dataclass(frozen=True, slots=True)
class ForecastResult:
    """`sizes` is empty, or has the bytes of each forecast's smallest SSD without stalls (None: no
    SSD suffices). `assumed` has the options that the user did not give, with their values."""

    forecasts: Sequence[Forecast]
    sizes: Sequence[int | None]
    files: ForecastFiles
    options: ForecastOptions
    assumed: Sequence[str]

    @property
    def best(self) -> Forecast:
        return recommended(self.forecasts)

    @property
    def commands(self) -> Sequence[str]:
        return commands(self.best, self.options)

    def show(self) -> None:
        if global_flags().json:
            print_json(self._described())
            return
        print_line(self._sentence())
        self._print_rows()
        self._print_notes()
        for line in self.commands:
            print_line(line)

    def _described(self) -> dict[str, object]:
        best, files, has_order = self.best, self.files, self.options.is_given_order
        rows = [
            described(each) | ({"shuffle": GIVEN} if has_order else {}) for each in self.forecasts
        ]
        for row, least in zip(rows, self.sizes, strict=False):
            row["smallest_cache_bytes"] = least
        return {
            "event": "done", "dataset": self.options.dataset, "files": len(files),
            "bytes": files.bytes, "chunks": len(files.chunk_bytes), "job": asdict(best.job),
            "assumed": [*self.assumed], "forecasts": rows,
            "recommended": {
                "policy": best.policy, "shuffle": GIVEN if has_order else best.job.shuffle,
                "commands": self.commands, "text": self._sentence(),
            },
        }  # fmt: skip

    def _sentence(self) -> str:
        best, options, mount = self.best, self.options, self.commands[0]
        later, node, machines = best.later, best.job.node, best.job.nodes
        name = f"{options.dataset} ({bytes_text(self.files.bytes)})"
        where = "the machine" if machines == 1 else f"the {machines} machines together"
        typed = f"type `{mount}`" if machines == 1 else f"type on each machine `{mount}`"
        if needs_no_cache(best, options):
            return (
                f"{name} fits in the memory of one machine, so the machines need not share a cache:"
                f" {typed}"
            )
        if not later.files[STORE]:
            what = "memory and SSD" if later.files[DISK] else "memory"
            return (
                f"{name} fits in {what} of {where}, so later epochs read nothing from the store:"
                f" {typed}"
            )
        kept = "memory and SSD" if node.disk_bytes else "memory"
        return (
            f"{name} does not fit in {kept} of {where}: a later epoch reads"
            f" {bytes_text(later.store_bytes)} from the store and waits"
            f" {100 * later.stalled:.0f} % of its time; the best is to {typed}"
        )

    def _print_rows(self) -> None:
        columns = (*_COLUMNS, "smallest SSD") if self.sizes else _COLUMNS
        rows = []
        for at, each in enumerate(self.forecasts):
            later, first = each.later, each.epochs[0]
            total = max(sum(later.files), 1)
            price = each.job.store.price(later.store_requests, later.store_bytes)
            cells = [
                GIVEN if self.options.is_given_order else each.job.shuffle,
                each.policy,
                *(f"{100 * count / total:.1f}%" for count in later.files),
                bytes_text(later.store_bytes),
                f"{later.store_requests:,}",
                bytes_text(later.written_bytes),
                f"{first.seconds:,.1f} s",
                f"{later.seconds:,.1f} s",
                f"{100 * later.stalled:.1f}%",
                f"{100 * later.on_time:.1f}%",
                f"{price:,.3g}",
            ]
            if self.sizes:
                least = self.sizes[at]
                cells.append("none" if least is None else bytes_text(least))
            rows.append(cells)
        print_table(columns, rows, columns[2:])

    def _print_notes(self) -> None:
        for layout in dict.fromkeys(each.layout for each in self.forecasts):
            policies = dict.fromkeys(
                each.policy for each in self.forecasts if each.layout == layout
            )
            print_note(f"with {', '.join(policies)} the cache keeps {UNITS[layout]}")
        job, files = self.forecasts[0].job, self.files
        batch_bytes = job.ranks * job.batch * files.bytes // len(files)
        window_bytes = min(each.job.node.window_bytes for each in self.forecasts)
        if window_bytes < 2 * batch_bytes:
            print_note(
                f"the memory to load ahead is {bytes_text(window_bytes)}, and a batch of all ranks"
                f" takes {bytes_text(batch_bytes)}: with more --memory they would wait less"
            )
        if self.assumed:
            print_note(f"assumed: {', '.join(self.assumed)}")


def size_text(size_bytes: int) -> str:
    """Rounds down to whole units that options take."""
    for unit, shift in (("G", 30), ("M", 20), ("K", 10)):
        if size_bytes >= 16 << shift or (size_bytes and size_bytes % (1 << shift) == 0):
            return f"{size_bytes >> shift}{unit}"
    return f"{size_bytes}"
