"""Experiments with a training loop that reads from a store: the time for which the loop waits; and
with reading samples without a mount, in one process, from the local disk.

The script (`training_program.py`) is stock PyTorch. Its files lie on the local disk, in the store
one by one, or on a mount of ours; the peers read shards of the same files from the same store. One
run of all sides takes minutes, so there is always one round, except in `steps` and `tuning`: these
repeat the experiments 1 and 2 of DLCache (section IV), with 50 batches for the paper's 100, and a
sleep in the place of the model as there. The paper's baseline reads a disk with 4 or 8 workers;
ours reads the files one by one from the store.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path

from ..cases.limits import read_twice
from ..dlcmd import PROGRAM, last_line
from ..inputs import D4, D110, Shape
from ..peers import python_of_training
from ..reading import write_list
from ..report import Row, Target, against, at_least, at_most, no_more_than
from ..samples import OURS, PeerMissing, Rounds, Side, alternate, progress, repeat
from ..store import BUCKET, SlowStore, slow_store
from ..stored import Stored, stored
from ..workbench import Workbench
from . import shards

MODEL_PART = 0.6  # the part of the store's bandwidth that the model needs
BATCH, WORKERS = 64, 4
EPOCHS, EPOCHS_WITHOUT_MODEL = 3, 2
MEMORY_PART = 4
CHUNK_BYTES, CHUNK_BYTES_MIN = 4 << 20, 64 << 10
SLOWER_MAX = 1.02  # as fast as the best: two runs of one side differ by as much

STEP_BATCHES = 50
STEPS_S = (0.0, 0.05, 0.1, 0.3)
"""The times of a step of the model: the store needs 36 ms for the bytes of a batch."""
STALL_FREE_MAX = 1.03
"""If the loop waits for nothing, DLCache is at most 3 % slower than PyTorch's loader (section IV-B,
4 workers); if it waits, it loads up to 2.47 times as fast."""
TUNING_S, SAMPLE_S = 0.02, 0.001
"""A step, and the work on a sample, also a sleep, so that the number of processors does not count:
a worker needs 64 ms for a batch, so 4 workers are enough (algorithm 2, line 2)."""
ENOUGH_WORKERS, BAD_STARTS = 4, (1, 16)

LOCAL, OBJECTS, NO_PLAN = "files on the local disk", "files in the store", "the mount, no plan"
CHUNK_WISE = "ours, --shuffle chunk"
SHUFFLES = {OURS: "full", CHUNK_WISE: "chunk"}
_STORED = "files"  # the folder of single files in the bucket
_DATASET = "images"
_LAUNCHED = (str(PROGRAM), "-q", "run")

SECONDS, WAITED, RATE = "s an epoch", "s waited", "files/s"
_PARTS = {"first": 15.0, "later": 5.0}
"""The most waiting in the first epoch, and in later ones, in percent."""

API_ROUNDS = 3
API_RATIOS = {D4: 2.0, D110: 1.0}  # to the better peer
FIRST, BEST = "first pass", "best pass"
_PEERS_PASSES = {
    FIRST: "as it iterates, shuffled",
    BEST: "the better of its ways, as it iterates, shuffled, and by random indices",
}
_READERS = {
    "read_many": ("indices", "views of the contents, in random order"),
    "DieselDataset": ("dataset", "bytes, in batches of 64 in random order"),
}


def waits(bench: Workbench) -> list[Row]:
    """Files of 110 KiB and a model that needs 60 % of the store's bandwidth, with much memory."""
    with _setting(bench, D110) as setting:
        return _time_rows(setting, alternate(1, setting.sides()), "train")


def little_memory(bench: Workbench) -> list[Row]:
    """The same with caches and a mount's memory that hold a quarter of the dataset. Sides without a
    cache are measured by `waits`."""
    with _setting(bench, D110, MEMORY_PART) as setting:
        sides = {k: v for k, v in setting.sides().items() if k not in (LOCAL, OBJECTS)}
        return _time_rows(setting, alternate(1, sides), "train with memory for a quarter of")


def rates(bench: Workbench) -> list[Row]:
    """The rates of the loaders without a model, with files of 110 KiB and of 4 KiB."""
    rows: list[Row] = []
    for shape in (D110, D4):
        with _setting(bench, shape, has_model=False) as setting:
            rounds = alternate(1, setting.sides())
            targets = _targets(rounds, at_least(1 / SLOWER_MAX))
            for part in _PARTS:
                for plan in SHUFFLES:
                    name, of = _name(setting, "load", part, plan), f"{part} {RATE}"
                    rows += against(rounds, name, RATE, targets, of=of, side=plan)
    return rows


def steps(bench: Workbench) -> list[Row]:
    """Steps of 0 to 300 ms, with a cold cache and 4 workers: the experiment 1 of DLCache."""
    rows: list[Row] = []
    with _setting(bench, _of_batches(STEP_BATCHES), peers=()) as setting:
        for step_s in STEPS_S:
            at = replace(setting, changed={"epochs": 1, "compute_s": step_s / bench.divisor})
            sides = at.sides()
            rounds = alternate(bench.rounds, {s: sides[s] for s in (OURS, NO_PLAN, OBJECTS)})
            for side, name in ((OURS, "with a plan"), (NO_PLAN, "without a plan")):
                name = f"{STEP_BATCHES} batches, steps of {1000 * step_s:.0f} ms, {name}"
                targets: dict[str, Target | None] = {OBJECTS: at_most(STALL_FREE_MAX)}
                if side == OURS:
                    targets[NO_PLAN] = at_most(SLOWER_MAX)
                rows += against(rounds, name, SECONDS, targets, of=f"first {SECONDS}", side=side)
                waited = dict.fromkeys(targets)
                rows += against(rounds, name, WAITED, waited, of=f"first {WAITED}", side=side)
    return rows


def tuning(bench: Workbench) -> list[Row]:
    """Too few and too many workers, in a loop for which 4 are enough, with a plan and without: the
    experiment 2 of DLCache."""
    enough = f"loader of {ENOUGH_WORKERS} with a plan"
    with _setting(bench, _of_batches(STEP_BATCHES), peers=()) as setting:
        sides: dict[str, Side] = {}
        for workers in (ENOUGH_WORKERS, *BAD_STARTS):
            changed = {"compute_s": TUNING_S, "sample_s": SAMPLE_S, "workers": workers}
            at = replace(setting, changed=changed).sides()
            sides[f"loader of {workers} with a plan"] = at[OURS]
            sides[f"loader of {workers}, {NO_PLAN}"] = at[NO_PLAN]
        rounds = alternate(bench.rounds, sides)
    rows: list[Row] = []
    for workers in BAD_STARTS:
        targets = {enough: at_most(STALL_FREE_MAX), f"loader of {workers}, {NO_PLAN}": None}
        side = f"loader of {workers} with a plan"
        for part in _PARTS:
            name, of = f"{side}, {_epochs(part)}", f"{part} {SECONDS}"
            rows += against(rounds, name, SECONDS, targets, of=of, side=side)
    return rows


def _of_batches(count: int) -> Shape:
    """As many files of 110 KiB as these batches have."""
    return replace(D110, name=f"{count} batches of D110", files=count * BATCH, folders=count)


def decoding(bench: Workbench) -> list[Row]:
    """The number of images of about 110 KiB that the processors decode; compared with it, loading
    is small."""
    command = program("decode", str(max(5.0 / bench.divisor, 0.2)))
    measured = repeat(min(bench.rounds, 3), lambda: json.loads(last_line(command)))
    how = "JPEG by Pillow, a process for each processor"
    return [
        Row("decode images of 110 KiB", "images/s", measured.ours("images"), note=how),
        Row("decode images of 110 KiB", "MB/s", measured.ours("bytes").map(lambda b: b / 1e6)),
    ]


def program(*words: str) -> list[str]:
    """The command that runs the script in the Python of training."""
    script = Path(__file__).with_name("training_program.py")
    return [python_of_training(), "-P", str(script), *words]


@dataclass(frozen=True, slots=True)
class _Setting:
    """A dataset in a store, in each form that a side reads."""

    bench: Workbench
    shape: Shape
    source: Path
    slow: SlowStore
    folder: Path
    memory_bytes: int
    """Bytes that memory holds; 0: all of the dataset."""
    has_model: bool
    packing: Mapping[str, str]
    """The peers that could not pack, and why."""
    changed: Mapping[str, object] = field(default_factory=dict)
    """Options of the script that an experiment sets otherwise."""

    @property
    def options(self) -> dict[str, object]:
        """The fields of `training_program.Options`."""
        need_per_s = MODEL_PART * self.slow.bytes_per_s
        return {
            "epochs": EPOCHS if self.has_model else EPOCHS_WITHOUT_MODEL,
            "batch": BATCH,
            "workers": WORKERS,
            "compute_s": BATCH * self.shape.file_bytes / need_per_s if self.has_model else 0.0,
            "list": str(self.folder / "list"),
            **self.changed,
        }

    def sides(self) -> dict[str, Side]:
        return {
            OURS: partial(self.mounted, *_LAUNCHED, "--"),
            CHUNK_WISE: partial(self.mounted, *_LAUNCHED, "--shuffle", "chunk", "--"),
            NO_PLAN: self.mounted,
            LOCAL: self.local,
            OBJECTS: self.objects,
            **{peer: partial(self.streamed, peer) for peer in shards.NAMES},
        }

    def stock(
        self, source: str, *prefix: str, environment: Mapping[str, str] | None = None
    ) -> dict[str, float]:
        """Run the stock script with its files at a place."""
        options = json.dumps({**self.options, "source": source})
        command = [*prefix, *program("train", options)]
        epochs: list[dict[str, float]] = json.loads(last_line(command, environment))
        for epoch in epochs:
            self.shape.check(epoch["files"], epoch["bytes"], epoch["sum"])
        return _figures(epochs)

    def local(self) -> dict[str, float]:
        self.bench.drop_page_cache(self.source)
        return self.stock(str(self.source))

    def objects(self) -> dict[str, float]:
        store = self.slow.store
        self.bench.warm_page_cache(store.bucket / _STORED)
        return self.stock(f"{store.endpoint}/{BUCKET}/{_STORED}")

    def mounted(self, *prefix: str) -> dict[str, float]:
        """Our mount, for a user without cached data of the dataset."""
        self.bench.warm_page_cache(self.slow.store.bucket / "datasets")
        with self.bench.scratch() as folder:
            dlcmd = self.slow.user(folder)
            limit = ("--memory", str(self.memory_bytes)) if self.memory_bytes else ()
            before = self.slow.store.counts()
            with dlcmd.mounted(_DATASET, folder / "mount", *limit):
                at, environment = str(folder / "mount"), dlcmd.users_environment
                figures = self.stock(at, *prefix, environment=environment)
            read = self.slow.store.counts() - before
            progress(
                f"the mount read {read.bytes / self.shape.bytes:.2f} times the dataset from the"
                f" store, with {read.requests:,} requests"
            )
            return figures

    def streamed(self, peer: str) -> dict[str, float]:
        """A peer, with an empty cache on the local disk."""
        if peer in self.packing:
            raise PeerMissing(self.packing[peer])
        store = self.slow.store
        self.bench.warm_page_cache(store.bucket / peer)
        with self.bench.scratch() as folder:
            epochs = shards.train(peer, self.options, store, folder, self.memory_bytes)
        spare = BATCH * WORKERS  # some repeat samples, so that all workers have equally many
        for epoch in epochs:
            assert abs(epoch["files"] - self.shape.files) <= spare, f"{peer} read {epoch}"
        return _figures(epochs)


@contextmanager
def _setting(
    bench: Workbench,
    wanted: Shape,
    memory_part: int = 0,
    *,
    has_model: bool = True,
    peers: Sequence[str] = shards.NAMES,
) -> Iterator[_Setting]:
    """Memory holds 1 / `memory_part` of the dataset, or all of it. Shards are packed for
    `peers`."""
    shape, source = bench.prepared(wanted)
    with ExitStack() as stack:
        folder = stack.enter_context(bench.scratch())
        write_list(shape.paths(), folder / "list")
        progress(f"packing {shape.name} for all sides")
        chunk = max(CHUNK_BYTES // bench.divisor, CHUNK_BYTES_MIN)
        slow = stack.enter_context(slow_store(folder, source, _DATASET, "--chunk-size", str(chunk)))
        bucket = slow.store.bucket
        (bucket / _STORED).symlink_to(source)
        packing: dict[str, str] = {}
        for peer in peers:
            try:
                shards.pack(peer, source, bucket / peer, shards.shard_bytes(bench))
            except PeerMissing as error:
                packing[peer] = str(error)
        memory_bytes = shape.bytes // memory_part if memory_part else 0
        yield _Setting(bench, shape, source, slow, folder, memory_bytes, has_model, packing)


def _figures(epochs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The figures of a run by name: those of the first epoch, and the mean of the later ones."""
    figures: dict[str, float] = {}
    for part, of in zip(_PARTS, (epochs[:1], epochs[1:]), strict=True):
        if not of:
            continue
        seconds, waited_s = (sum(each[key] for each in of) for key in ("seconds", "waited_s"))
        figures[f"{part} {SECONDS}"] = seconds / len(of)
        figures[f"{part} {WAITED}"] = waited_s / len(of)
        figures[f"{part} {RATE}"] = sum(each["files"] for each in of) / seconds
        figures[f"{part} percent"] = 100 * waited_s / seconds
    return figures


def _time_rows(setting: _Setting, rounds: Rounds, what: str) -> list[Row]:
    """Each plan against the limits of waiting, and against each other side."""
    rows: list[Row] = []
    targets = _targets(rounds, at_most(SLOWER_MAX))
    for part, limit in _PARTS.items():
        for plan in SHUFFLES:
            name = _name(setting, what, part, plan)
            rows.append(no_more_than(name, "% waited", rounds.of(plan, f"{part} percent"), limit))
            rows += against(rounds, name, SECONDS, targets, of=f"{part} {SECONDS}", side=plan)
            if plan == OURS:
                none, of = dict.fromkeys(targets), f"{part} {WAITED}"
                rows += against(rounds, f"{name}, waiting", WAITED, none, of=of)
    return rows


def _targets(rounds: Rounds, target: Target) -> dict[str, Target | None]:
    """The other sides than the plans; only those that read from the store have a target."""
    others = [side for side in rounds.runs if side not in SHUFFLES]
    return {side: None if side == LOCAL else target for side in others}


def _name(setting: _Setting, what: str, part: str, plan: str) -> str:
    return f"{what} {setting.shape.name}, plan {SHUFFLES[plan]}, {_epochs(part)}"


def _epochs(part: str) -> str:
    return "first epoch" if part == "first" else "later epochs"


def api(bench: Workbench) -> list[Row]:
    """Files of 4 KiB and of 110 KiB on the local disk and in the page cache, read in one process by
    all readers in turns: our first pass, which loads and checks the chunks, against the first one
    of each peer, and the best pass of each."""
    rows: list[Row] = []
    for shape, ratio in API_RATIOS.items():
        with stored(bench, bench.shape(shape)) as data:
            sides: dict[str, Side] = {
                **{name: partial(_ours, data, by, count()) for name, (by, _) in _READERS.items()},
                **{peer: partial(_peer, data, peer, count()) for peer in (shards.MDS, shards.LIT)},
            }
            rounds = alternate(min(bench.rounds, API_ROUNDS), sides)
        for reader, (_, how) in _READERS.items():
            for which, passes in _PEERS_PASSES.items():
                name = f"{reader} {shape.name}, one process, {which}"
                for peer in (shards.MDS, shards.LIT):
                    target, note = {peer: at_least(ratio)}, f"{how}; {peer}: {passes}"
                    rows += against(rounds, name, RATE, target, note, of=which, side=reader)
    return rows


def _ours(data: Stored, by: str, seeds: "count[int]") -> Mapping[str, float]:
    seconds = read_twice(data, next(seeds), by, "count")
    return {FIRST: data.shape.files / seconds[0], BEST: data.shape.files / min(seconds)}


def _peer(data: Stored, peer: str, seeds: "count[int]") -> Mapping[str, float]:
    folder, shape = data.folder / peer, data.shape
    if not folder.exists():
        shards.pack(peer, data.source, folder, shards.shard_bytes(data.bench))
    data.bench.warm_page_cache(folder)
    passes = shards.read(peer, folder, next(seeds))
    shape.check(passes.files, passes.bytes, passes.sum)
    best_s = min(*passes.iterated, *passes.indexed)
    return {FIRST: shape.files / passes.iterated[0], BEST: shape.files / best_s}
