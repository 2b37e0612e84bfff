"""The verb `forecast`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, SupportsFloat, SupportsIndex

import click
import numpy as np
from click.core import ParameterSource

from diesel_fs.errors import NoSuchPath, UsageError
from diesel_fs.forecast.kept import NAMES, ORDER_LOG
from diesel_fs.forecast.nodes import ForecastJob, ForecastNode, ForecastStore, Shuffle
from diesel_fs.forecast.reads import ForecastFiles
from diesel_fs.forecast.report import ForecastOptions
from diesel_fs.format.entries import Kind
from diesel_fs.format.snapshot.reader import Indices, Snapshot
from diesel_fs.mounts.prefetch.memory import KNOWN_DIVISOR, KNOWN_ENTRY_BYTES
from diesel_fs.mounts.source import MemorySplit
from diesel_fs.peers.node.ledger import chunk_budget_bytes
from diesel_fs.system.available_memory import default_memory_bytes

from ..args.addresses import Address, open_repository_from_flags, versioned_address
from ..args.fields import FieldOption, Values, made, options_of
from ..args.options import argument, file_path, option, size, verb
from ..show.forecast import ForecastResult, size_text
from ..show.forecast_page import forecast_page
from ..show.pages import write_page
from ..show.progress import shown_progress
from ..simulations import Comparison, compare


@dataclass(frozen=True, slots=True)
class Machine:
    memory_bytes: int = field(default_factory=default_memory_bytes)
    cache_bytes: int = 0
    network_bytes_per_s: int = 1250 << 20

    def node(self, policy: str, files: ForecastFiles) -> ForecastNode:
        in_task = policy != ORDER_LOG  # an order log needs no task's cache
        split = MemorySplit(self.memory_bytes, in_task)
        known_bytes = len(files) * KNOWN_ENTRY_BYTES  # for names and inodes
        window_bytes = split.push_bytes - min(known_bytes, split.push_bytes // KNOWN_DIVISOR)
        has_disk = self.cache_bytes > 0
        kept_bytes = chunk_budget_bytes(split.task_bytes, files.chunk_bytes, has_disk=has_disk)
        return ForecastNode(
            window_bytes, kept_bytes, self.cache_bytes,
            network_bytes_per_s=self.network_bytes_per_s,
        )  # fmt: skip


_BITS = re.compile(r"(\d{1,9})([KMGT]?)bit(?:/s)?", re.IGNORECASE | re.ASCII)


def rate(text: str) -> int:
    """Parses bytes a second (125M, 1G), or bits (10Gbit)."""
    if (bits := _BITS.fullmatch(text)) is not None:
        power = " KMGT".index(bits[2].upper() or " ")
        return int(int(bits[1]) * 1000**power) // 8
    try:
        return size(text.removesuffix("/s"))
    except UsageError:
        raise UsageError(
            f"bad rate {text!r}", advice="write bytes a second as 125M or 1G, or bits as 10Gbit"
        ) from None


class _Milliseconds(click.types.FloatParamType):
    """The user gives milliseconds; the value is in seconds."""

    def convert(
        self,
        value: SupportsFloat | SupportsIndex,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> float:
        return float(super().convert(value, param, ctx)) / 1000


@verb("forecast")
@argument("target", type=versioned_address, metavar="DATASET[@VERSION]")
@options_of(
    ForecastJob, "job",
    nodes=FieldOption("Machines of the job.", type=int, metavar="N", shows_default=True),
    ranks=FieldOption(
        "Training processes (GPUs) on each machine.",
        type=int, metavar="N", default=8, shows_default=True,
    ),
    batch=FieldOption(
        "Files that each of these reads in one iteration.",
        type=int, metavar="N", shows_default=True,
    ),
    workers=FieldOption(
        "Workers of each DataLoader; each has two batches under way.",
        type=int, metavar="N", shows_default=True,
    ),
)  # fmt: skip
@options_of(
    Machine, "machine",
    memory_bytes=FieldOption(
        "Memory of each machine for contents, as in `mount --memory`.  [default: half of this"
        " machine's free memory]", "memory", type=size,
    ),
    cache_bytes=FieldOption(
        "SSD of each machine for the cache, as in `mount --cache-size`; 0: none.", "cache-size",
        type=size, default="0", shows_default=True,
    ),
    network_bytes_per_s=FieldOption(
        "Bytes a second that a machine gets from the others; 10Gbit is 1250 million.", "network",
        type=rate, metavar="RATE", default="1250M", shows_default=True,
    ),
)  # fmt: skip
@options_of(
    ForecastStore, "store",
    request_s=FieldOption(
        "Milliseconds until the first byte of a request to the store.", "store-latency",
        type=_Milliseconds(), metavar="MS", default=20.0, shows_default=True,
    ),
    bytes_per_s=FieldOption(
        "Bytes a second that a machine gets from the store.", "store-bandwidth",
        type=rate, metavar="RATE", default="1G", shows_default=True,
    ),
    price_per_1000=FieldOption(
        "Price of 1,000 requests to the store, in any currency.", "request-price",
        type=float, metavar="X", shows_default=True,
    ),
)  # fmt: skip
@options_of(
    ForecastJob, "job",
    images_per_s=FieldOption(
        "Files a second that each rank would train on, if it never waited for one.",
        type=float, metavar="N", shows_default=True,
    ),
    epochs=FieldOption(
        "Epochs to simulate; the last one stands for all later ones.",
        type=int, metavar="N", shows_default=True,
    ),
    seed=FieldOption(
        "Seed of the random orders.", type=int, metavar="N", shows_default=True
    ),
)  # fmt: skip
@option(
    "--shuffle", type=click.Choice(["full", "chunk", "both"]), default="both", show_default=True,
    help="Which orders to compare: fully random, chunk-wise random, or both.",
)  # fmt: skip
@options_of(
    ForecastJob, "job",
    group_size=FieldOption(
        "Chunks in a group of chunk-wise orders: their files are shuffled together.",
        type=int, metavar="N", shows_default=True,
    ),
)  # fmt: skip
@option(
    "--evict", type=click.Choice(NAMES), multiple=True, default=NAMES,
    help="Eviction policies to compare; `order` is the order log, a cache on the SSD in reading"
    " order. May be given several times.  [default: all; `order` only with --cache-size]",
)  # fmt: skip
@option(
    "--order", type=file_path, metavar="FILE",
    help="Read in this order in each epoch: one path a line, as `dlcmd shuffle` prints them.",
)  # fmt: skip
@option(
    "--smallest", is_flag=True,
    help="Find the smallest --cache-size without stalls, too; six simulations for each row.",
)  # fmt: skip
@option(
    "--html", type=file_path, metavar="FILE",
    help="Write the result with charts into this file, a self-contained page.",
)  # fmt: skip
def forecast(
    target: Address, job: Values, machine: Values, store: Values,
    shuffle: Literal["full", "chunk", "both"], evict: Sequence[str], order: Path | None,
    smallest: bool, html: Path | None,
) -> None:  # fmt: skip
    """Predict what a training job will read, hit, cost and wait for.

    Each row is an order and a policy, simulated read by read. The best row is the fastest, or the
    cheapest of equally fast ones: the first line has its `mount` command and the reason, the last
    lines all its commands. All columns except `first`, the first epoch's time, are of a later one:
    the sources of its files (`memory` to `store`), bytes and requests from the store, bytes written
    to SSDs, its time, the part of it spent waiting, the part of files in memory on time, the price.

    Options that you leave out are assumed, and a note names them. Only the snapshot is read.

    \b
    Examples:
      dlcmd forecast pets --memory 16G --cache-size 200G
      dlcmd forecast pets --nodes 4 --images-per-s 2500 --evict plan --evict lru
      dlcmd forecast pets --shuffle full --cache-size 1T --smallest --html pets.html
    """
    if machine.get("memory_bytes") == 0:
        raise UsageError("--memory 0 leaves no room for contents", advice="name 1M or more")
    if target.path:
        raise UsageError(f"{target} names a folder", advice="forecast a whole dataset")
    each_machine = made(Machine, machine)
    policies = _policies(evict, each_machine.cache_bytes)
    with open_repository_from_flags() as repository:
        view = target.view(repository)
        files = ForecastFiles.of(view)
        given = None if order is None else _read_order(view, order)
    first = made(
        ForecastJob,
        job,
        node=each_machine.node(policies[0], files),
        store=made(ForecastStore, store),
    )
    shuffles: Sequence[Shuffle] = ("full", "chunk") if shuffle == "both" else (shuffle,)
    comparisons = [
        Comparison(policy, replace(first, node=each_machine.node(policy, files), shuffle=each))
        for each in (shuffles if given is None else shuffles[:1])
        for policy in policies
    ]
    with shown_progress(f"forecast {target}", "steps") as show:
        found = compare(Comparison.run, comparisons, files, given, show)
        sizes = compare(Comparison.size, comparisons, files, given, show) if smallest else []
    # The last: whether one machine suffices
    options = ForecastOptions(
        str(target), size_text(each_machine.memory_bytes), size_text(each_machine.cache_bytes),
        given is not None, each_machine.node(ORDER_LOG, files).window_bytes >= files.bytes,
    )  # fmt: skip
    result = ForecastResult(found, sizes, files, options, _assumed())
    if html is not None:
        write_page(html, forecast_page(result))
    result.show()


def _policies(evict: Sequence[str], cache_size: int) -> list[str]:
    names = [*dict.fromkeys(evict)]
    if ORDER_LOG in names and not cache_size:
        if _is_given("evict"):
            raise UsageError("--evict order needs an SSD", advice="give its size with --cache-size")
        names.remove(ORDER_LOG)
    return names


def _is_given(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source not in (ParameterSource.DEFAULT, None)


def _assumed() -> list[str]:
    texts = []
    for each in click.get_current_context().command.params:
        if each.name in _ASSUMED and not _is_given(each.name):
            value = each.default
            if each.name == "memory_bytes":
                value = f"{size_text(default_memory_bytes())} (measured here)"
            texts.append(f"{each.opts[0]} {value}")
    return texts


_ASSUMED = {
    *("nodes", "ranks", "batch", "workers", "memory_bytes", "cache_bytes", "network_bytes_per_s"),
    *("request_s", "bytes_per_s", "price_per_1000", "images_per_s"),
}


def _read_order(view: Snapshot, file: Path) -> Indices:
    """Returns positions among the snapshot's files."""
    try:
        paths = file.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    if not paths:
        raise UsageError(f"{file} is empty", advice="name one path a line, as `dlcmd shuffle` does")
    entries = view.lookup_many(paths)
    if len(absent := np.flatnonzero(entries < 0)):
        path = paths[int(absent[0])].decode("utf-8", "replace")
        raise NoSuchPath(f"{view.dataset} has no {path} (line {int(absent[0]) + 1} of {file})")
    is_file = view.stat_many(entries).kind == Kind.FILE
    if not is_file.all():
        line = int(np.argmin(is_file))
        raise UsageError(f"line {line + 1} of {file} names no file: {paths[line]!r}")
    return np.searchsorted(view.files(), entries)
