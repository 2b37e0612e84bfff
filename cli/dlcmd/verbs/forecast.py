"""The verb `forecast`: says beforehand what a training job will read, hit, cost and wait for."""

import multiprocessing
import os
import re
import signal
from collections.abc import Callable, MutableSequence, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import click
import numpy as np
from click.core import ParameterSource

from diesel_fs.errors import DieselError, NoSuchPath, UsageError
from diesel_fs.forecast.kept import DISK, NAMES, ORDER_LOG, STORE, OnProgress
from diesel_fs.forecast.nodes import Job, Node, Shuffle, Store
from diesel_fs.forecast.reads import Files
from diesel_fs.forecast.report import (
    UNITS,
    Options,
    commands,
    described,
    needs_no_cache,
    recommended,
)
from diesel_fs.forecast.simulate import Forecast
from diesel_fs.forecast.simulate import forecast as simulate
from diesel_fs.forecast.smallest import smallest_disk
from diesel_fs.format.entries import Kind
from diesel_fs.format.snapshot.reader import Indices, Snapshot
from diesel_fs.mounts.prefetch.planner import KNOWN_DIVISOR
from diesel_fs.mounts.prefetch.units import KNOWN_ENTRY_BYTES
from diesel_fs.mounts.source import MemorySplit
from diesel_fs.orders.shuffle import GROUP_SIZE_DEFAULT
from diesel_fs.peers.node.ledger import chunk_budget_bytes
from diesel_fs.system.atomic_file import atomic_file, write_error
from diesel_fs.system.available_memory import default_memory_bytes

from ..args.addresses import Address, open_repository_from_flags, versioned_address
from ..args.options import argument, file_path, global_flags, option, size, verb
from ..show.forecast_page import forecast_page
from ..show.output import bytes_text, print_json, print_line, print_note, print_table
from ..show.progress import ShowProgress, shown_progress

PARALLEL_READS_MIN = 400_000
"""Comparisons of fewer reads are simulated in this process: others would take longer to start."""

GIVEN = "given"
"""The name of the order that `--order` gives, among the shuffles."""

POLL_S = 0.2

_COLUMNS = (
    *("order", "policy", "memory", "SSD", "peers", "store", "egress", "requests", "written"),
    *("first", "later", "stalled", "on time", "price"),
)
_STEPS = 1000  # of a simulation's progress


@dataclass(frozen=True, slots=True)
class Comparison:
    """One simulation: a policy, and the job with the sizes that its cache gets."""

    policy: str
    job: Job

    def run(self, files: Files, given: Indices | None, progress: OnProgress) -> Forecast:
        """Simulate it."""
        return simulate(self.job, files, self.policy, given=given, progress=progress)

    def size(self, files: Files, given: Indices | None, progress: OnProgress) -> int | None:
        """The smallest SSD without stalls (`smallest.py`)."""
        return smallest_disk(
            self.job, files.bytes, lambda job: replace(self, job=job).run(files, given, progress)
        )


_BITS = re.compile(r"(\d{1,9})([KMGT]?)bit(?:/s)?", re.IGNORECASE | re.ASCII)


def rate(text: str) -> int:
    """A number of bytes a second: 125M, 1G, or of bits a second: 10Gbit. Raises UsageError."""
    if (bits := _BITS.fullmatch(text)) is not None:
        power = " KMGT".index(bits[2].upper() or " ")
        return int(int(bits[1]) * 1000**power) // 8
    try:
        return size(text.removesuffix("/s"))
    except UsageError:
        raise UsageError(
            f"bad rate {text!r}", advice="write bytes a second as 125M or 1G, or bits as 10Gbit"
        ) from None


@verb("forecast")
@argument("target", type=versioned_address, metavar="DATASET[@VERSION]")
@option("--nodes", type=int, metavar="N", default=1, show_default=True, help="Machines of the job.")
@option(
    "--ranks", type=int, metavar="N", default=8, show_default=True,
    help="Training processes (GPUs) on each machine.",
)  # fmt: skip
@option(
    "--batch", type=int, metavar="N", default=64, show_default=True,
    help="Files that each of these reads in one iteration.",
)  # fmt: skip
@option(
    "--workers", type=int, metavar="N", default=4, show_default=True,
    help="Workers of each DataLoader; each has two batches under way.",
)  # fmt: skip
@option(
    "--memory", type=size,
    help="Memory of each machine for contents, as in `mount --memory`.  [default: half of this"
    " machine's free memory]",
)  # fmt: skip
@option(
    "--cache-size", type=size, default="0", show_default=True,
    help="SSD of each machine for the cache, as in `mount --cache-size`; 0: none.",
)  # fmt: skip
@option(
    "--network", type=rate, metavar="RATE", default="1250M", show_default=True,
    help="Bytes a second that a machine gets from the others; 10Gbit is 1250 million.",
)  # fmt: skip
@option(
    "--store-latency", type=float, metavar="MS", default=20.0, show_default=True,
    help="Milliseconds until the first byte of a request to the store.",
)  # fmt: skip
@option(
    "--store-bandwidth", type=rate, metavar="RATE", default="1G", show_default=True,
    help="Bytes a second that a machine gets from the store.",
)  # fmt: skip
@option(
    "--request-price", type=float, metavar="X", default=0.0004, show_default=True,
    help="Price of 1,000 requests to the store, in any currency.",
)  # fmt: skip
@option(
    "--images-per-s", type=float, metavar="N", default=1000.0, show_default=True,
    help="Files a second that each rank would train on, if it never waited for one.",
)  # fmt: skip
@option(
    "--epochs", type=int, metavar="N", default=3, show_default=True,
    help="Epochs to simulate; the last one stands for all later ones.",
)  # fmt: skip
@option(
    "--seed", type=int, metavar="N", default=0, show_default=True,
    help="Seed of the random orders.",
)  # fmt: skip
@option(
    "--shuffle", type=click.Choice(["full", "chunk", "both"]), default="both", show_default=True,
    help="Which orders to compare: fully random, chunk-wise random, or both.",
)  # fmt: skip
@option(
    "--group-size", type=int, metavar="N", default=GROUP_SIZE_DEFAULT, show_default=True,
    help="Chunks in a group of chunk-wise orders: their files are shuffled together.",
)  # fmt: skip
@option(
    "--evict", type=click.Choice(NAMES), multiple=True, default=NAMES,
    help="Which policies to compare: of the cache of chunks, or `order`, the order log on the SSD."
    " May be given several times.  [default: all; `order` only with --cache-size]",
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
    help="Draw all that into this file, a page that needs no other.",
)  # fmt: skip
def forecast(
    target: Address, nodes: int, ranks: int, batch: int, workers: int, memory: int | None,
    cache_size: int, network: int, store_latency: float, store_bandwidth: int,
    request_price: float, images_per_s: float, epochs: int, seed: int,
    shuffle: Literal["full", "chunk", "both"], group_size: int, evict: Sequence[str],
    order: Path | None, smallest: bool, html: Path | None,
) -> None:  # fmt: skip
    """Say beforehand what a training job will read, hit, cost and wait for.

    The epochs are simulated read by read, with the eviction policies that a mount uses, for each
    policy and order. The columns `memory` to `store` say where the files of a later epoch come
    from; then come the bytes and requests that it takes from the store, what it writes to the SSDs,
    the times of the first and of later epochs, and how much of that is waiting. The first line says
    what to type, and why; the last lines are the commands for the best of the rows: the fastest,
    and among equally fast ones the cheapest.

    What you do not say is assumed, and named in a note. Nothing is read but the snapshot.

    \b
    Examples:
      dlcmd forecast pets --memory 16G --cache-size 200G
      dlcmd forecast pets --nodes 4 --images-per-s 2500 --evict plan --evict lru
      dlcmd forecast pets --shuffle full --cache-size 1T --smallest --html pets.html
    """
    if memory == 0:
        raise UsageError("--memory 0 leaves no room for contents", advice="name 1M or more")
    if target.path:
        raise UsageError(f"{target} names a folder", advice="forecast a whole dataset")
    names = _policies(evict, cache_size)
    with open_repository_from_flags() as repository:
        view = target.view(repository)
        files = Files.of(view)
        given = None if order is None else _read_order(view, order)
    split = partial(_node, files=files, memory=memory or default_memory_bytes(),
                    cache_size=cache_size, network=network)  # fmt: skip
    store = Store(store_latency / 1000, store_bandwidth, price_per_1000=request_price)
    job = Job(
        split(names[0]), store, nodes, ranks, batch, workers, images_per_s, epochs, seed, "full",
        group_size,
    )  # fmt: skip
    orders: Sequence[Shuffle] = ("full", "chunk") if shuffle == "both" else (shuffle,)
    comparisons = [
        Comparison(name, replace(job, node=split(name), shuffle=each))
        for each in (orders if given is None else orders[:1])
        for name in names
    ]
    with shown_progress(f"forecast {target}", "steps") as show:
        found = compare(Comparison.run, comparisons, files, given, show)
        sizes = compare(Comparison.size, comparisons, files, given, show) if smallest else []
    best = recommended(found)
    options = Options(
        str(target), _size_text(memory or default_memory_bytes()), _size_text(cache_size),
        given is not None, split(ORDER_LOG).window_bytes >= files.bytes,
    )  # fmt: skip
    told, assumed = commands(best, options), _assumed()
    sentence = _sentence(best, options, told[0], files)
    if html is not None:
        _write(html, forecast_page(str(target), found, best, told, assumed, sizes))
    if global_flags().json:
        rows = [described(each) | ({"shuffle": GIVEN} if order else {}) for each in found]
        for row, least in zip(rows, sizes, strict=False):
            row["smallest_cache_bytes"] = least
        taken = GIVEN if order else best.job.shuffle
        print_json(
            {
                "event": "done", "dataset": str(target), "files": len(files), "bytes": files.bytes,
                "chunks": len(files.chunk_bytes), "job": asdict(best.job), "assumed": assumed,
                "forecasts": rows,
                "recommended": {
                    "policy": best.policy, "shuffle": taken, "commands": told, "text": sentence,
                },
            }
        )  # fmt: skip
        return
    print_line(sentence)
    _print_rows(found, sizes, is_given=given is not None)
    for layout in dict.fromkeys(each.layout for each in found):
        with_layout = dict.fromkeys(each.policy for each in found if each.layout == layout)
        print_note(f"with {', '.join(with_layout)} the cache keeps {UNITS[layout]}")
    batch_bytes = job.ranks * job.batch * files.bytes // len(files)
    window_bytes = min(each.job.node.window_bytes for each in found)
    if window_bytes < 2 * batch_bytes:
        print_note(
            f"the memory to load ahead is {bytes_text(window_bytes)}, and a batch of all ranks"
            f" takes {bytes_text(batch_bytes)}: with more --memory they would wait less"
        )
    if assumed:
        print_note(f"assumed, as you did not say: {', '.join(assumed)}")
    for line in told:
        print_line(line)


def _sentence(best: Forecast, options: Options, mount: str, files: Files) -> str:
    """What to type, and why. `mount` is the command for it."""
    later, node, machines = best.later, best.job.node, best.job.nodes
    name = f"{options.dataset} ({bytes_text(files.bytes)})"
    where = "the machine" if machines == 1 else f"the {machines} machines together"
    typed = f"type `{mount}`" if machines == 1 else f"type on each machine `{mount}`"
    if needs_no_cache(best, options):
        return f"{name} fits in the memory of one machine, which needs no task's cache: {typed}"
    if not later.files[STORE]:
        what = "memory and SSD" if later.files[DISK] else "memory"
        return (
            f"{name} fits in {what} of {where}, so later epochs read nothing from the store:"
            f" {typed}"
        )
    kept = "memory and SSD" if node.disk_bytes else "memory"
    return (
        f"{name} does not fit in {kept} of {where}: a later epoch reads"
        f" {bytes_text(later.store_bytes)} from the store and waits {100 * later.stalled:.0f} % of"
        f" its time; best {typed}"
    )


def _policies(evict: Sequence[str], cache_size: int) -> list[str]:
    """The policies to compare, each once. Raises UsageError."""
    names = [*dict.fromkeys(evict)]
    if ORDER_LOG in names and not cache_size:
        if _is_given("evict"):
            raise UsageError(
                "--evict order needs an SSD", advice="say how much of it with --cache-size"
            )
        names.remove(ORDER_LOG)
    return names


def _is_given(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source not in (ParameterSource.DEFAULT, None)


def _assumed() -> list[str]:
    """The options of the job that the user did not give, with their values."""
    context = click.get_current_context()
    names = ("nodes", "ranks", "batch", "workers", "memory", "cache_size", "network",
             "store_latency", "store_bandwidth", "request_price", "images_per_s")  # fmt: skip
    texts = []
    for each in context.command.params:
        if each.name in names and not _is_given(each.name):
            value = context.params[each.name]
            if each.name == "memory":
                value = f"{_size_text(default_memory_bytes())} (measured here)"
            elif each.name in ("cache_size", "network", "store_bandwidth"):
                value = _size_text(value)
            texts.append(f"{each.opts[0]} {value}")
    return texts


def _node(name: str, *, files: Files, memory: int, cache_size: int, network: int) -> Node:
    """How a machine divides its memory with a policy, as a mount does."""
    in_task = name != ORDER_LOG
    split = MemorySplit(memory, in_task)
    known_bytes = len(files) * KNOWN_ENTRY_BYTES  # of names that the kernel knows
    window_bytes = split.push_bytes - min(known_bytes, split.push_bytes // KNOWN_DIVISOR)
    kept_bytes = chunk_budget_bytes(split.task_bytes, files.chunk_bytes, has_disk=cache_size > 0)
    return Node(window_bytes, kept_bytes, cache_size, network_bytes_per_s=network)


def _read_order(view: Snapshot, file: Path) -> Indices:
    """The order in a file, as numbers of files. Raises NoSuchPath, UsageError."""
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


# Comparisons, in parallel -------------------------------------------------------------------------

Made = TypeVar("Made")

Task = Callable[[Comparison, Files, Indices | None, OnProgress], Made]
"""`Comparison.run` or `Comparison.size`."""

Progress = MutableSequence[float]
"""Of each comparison the part that is done, 0 to 1, in memory that processes share."""

_inputs: list[tuple[Files, Indices | None, Progress]] = []  # of a process of the pool: one item


def compare(
    task: "Task[Made]",
    comparisons: Sequence[Comparison],
    files: Files,
    given: Indices | None,
    show: ShowProgress,
    *,
    processes: int = 0,
) -> list[Made]:
    """The results of all comparisons, in their order, from several processes where that is faster.

    `processes` is their number; 0: as many as there are processors, or one for few reads.
    """
    steps = _STEPS * len(comparisons)
    if not processes:
        reads = sum(each.job.epochs for each in comparisons) * len(files)
        usable = len(os.sched_getaffinity(0)) if reads >= PARALLEL_READS_MIN else 1
        processes = min(usable, len(comparisons))
    if processes == 1:
        found: list[Made] = []
        for each in comparisons:

            def note(part: float) -> None:
                show(int(_STEPS * (len(found) + part)), steps)

            found.append(task(each, files, given, note))
        return found
    # Forked processes might hang in what a client of a cloud has started
    context = multiprocessing.get_context("spawn")
    progress = context.Array("d", len(comparisons), lock=False)
    pool = ProcessPoolExecutor(
        processes, context, initializer=_begin_process, initargs=(files, given, progress)
    )
    try:
        futures = [pool.submit(_run_one, task, each, at) for at, each in enumerate(comparisons)]
        while wait(futures, POLL_S).not_done:
            show(int(_STEPS * sum(progress)), steps)
        return [each.result() for each in futures]
    except BrokenProcessPool as error:
        raise DieselError(
            "a process that simulated has ended early, perhaps for want of memory",
            advice="compare fewer policies with --evict, or fewer --epochs",
        ) from error
    finally:
        children = {*multiprocessing.active_children()}
        pool.shutdown(wait=False, cancel_futures=True)
        for child in children:
            child.terminate()


def _begin_process(files: Files, given: Indices | None, progress: Progress) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a word
    _inputs[:] = [(files, given, progress)]


def _run_one(task: "Task[Made]", comparison: Comparison, number: int) -> Made:
    files, given, progress = _inputs[0]

    def note(part: float) -> None:
        progress[number] = part

    return task(comparison, files, given, note)


# Output -------------------------------------------------------------------------------------------


def _print_rows(found: Sequence[Forecast], sizes: Sequence[int | None], *, is_given: bool) -> None:
    """A row for each policy and order; it describes the last epoch."""
    columns = (*_COLUMNS, "smallest SSD") if sizes else _COLUMNS
    rows = []
    for at, each in enumerate(found):
        later, first = each.later, each.epochs[0]
        total = max(sum(later.files), 1)
        price = each.job.store.price(later.store_requests, later.store_bytes)
        cells = [
            GIVEN if is_given else each.job.shuffle,
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
        if sizes:
            least = sizes[at]
            cells.append("none" if least is None else bytes_text(least))
        rows.append(cells)
    print_table(columns, rows, columns[2:])


def _size_text(size_bytes: int) -> str:
    """A size as options take it, rounded down to whole units."""
    for unit, shift in (("G", 30), ("M", 20), ("K", 10)):
        if size_bytes >= 16 << shift or (size_bytes and size_bytes % (1 << shift) == 0):
            return f"{size_bytes >> shift}{unit}"
    return f"{size_bytes}"


def _write(file: Path, text: str) -> None:
    """Write a page. Raises UsageError, DieselError where that fails."""
    try:
        with atomic_file(file, mode=0o666, sync=False) as opened:
            opened.write(text.encode())
    except OSError as error:
        raise write_error(str(file), error) from error
