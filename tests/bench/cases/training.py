"""Benchmarks of a training loop whose data lie in a store: how long the loop waits for them.

The script (`training_program.py`) is stock PyTorch. Its files lie on the local disk, in the store
one by one, or on a mount of ours; the peers read shards of the same files from the same store.
One run of all sides takes minutes, so there is one round, whatever the bench was told.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.storage.metadata.redis_servers import RedisServer

from ..dlcmd import DEADLINE_S, PROGRAM, Dlcmd, help_of
from ..epochs import prepared
from ..inputs import D4, D110, Shape
from ..peers import installed, streams
from ..reader import write_list
from ..report import Row, at_least, at_most, within
from ..samples import OURS, PeerMissing, Rounds, Side, alternate, say
from ..store import BUCKET, Store, serving
from ..workbench import Workbench

STORE_S, STORE_BYTES_PER_S = 0.005, 200e6
MODEL_PART = 0.6  # of the store's bandwidth: what the model needs
BATCH, WORKERS = 64, 4
EPOCHS, EPOCHS_WITHOUT_MODEL = 3, 2
MEMORY_PART = 4
SHARD_BYTES, SHARD_BYTES_MIN = 64 << 20, 1 << 20  # what two of the peers have as their defaults
CHUNK_BYTES, CHUNK_BYTES_MIN = 4 << 20, 64 << 10

FIRST_WAIT_MAX, LATER_WAIT_MAX = 15.0, 5.0  # percent of an epoch
SLOWER_MAX = 1.02  # as fast as the best: two runs of one side differ by as much

LOCAL, OBJECTS, NO_PLAN = "files on the local disk", "files in the store", "the mount, no plan"
FULL, CHUNK = OURS, "ours, --shuffle chunk"
SHUFFLES = {FULL: "full", CHUNK: "chunk"}
_STORED = "files"  # the folder of single files in the bucket
_DATASET = "images"
_PROGRAM = Path(__file__).parent.parent / "training_program.py"

SECONDS, WAITED, RATE = "s an epoch", "s waited", "files/s"
_PARTS = ("first", "later")


def waits(bench: Workbench) -> list[Row]:
    """Files of 110 KiB and a model that needs 60 % of the store's bandwidth, with much memory."""
    with _setting(bench, D110) as setting:
        return _time_rows(setting, setting.run(_sides(setting)), "train")


def little_memory(bench: Workbench) -> list[Row]:
    """The same where caches and the mount's memory hold a quarter of the dataset. Sides without a
    cache are measured by `waits`."""
    with _setting(bench, D110, MEMORY_PART) as setting:
        sides = _sides(setting)
        for name in (LOCAL, OBJECTS):
            del sides[name]
        return _time_rows(setting, setting.run(sides), "train with memory for a quarter of")


def rates(bench: Workbench) -> list[Row]:
    """How fast the loaders are without a model, with files of 110 KiB and of 4 KiB."""
    rows: list[Row] = []
    for shape in (D110, D4):
        with _setting(bench, shape, has_model=False) as setting:
            rows += _rate_rows(setting, setting.run(_sides(setting)))
    return rows


def decoding(bench: Workbench) -> list[Row]:
    """How many images of about 110 KiB the processors decode, beside which loading is small."""
    code = Path(__file__).parent.parent / "decoding_program.py"
    seconds = str(max(5.0 / bench.divisor, 0.2))

    def decode() -> dict[str, float]:
        said: dict[str, float] = json.loads(
            _output([python_of_training(), "-P", str(code), seconds])
        )
        return said

    measured = alternate(min(bench.rounds, 3), {OURS: decode})
    how = "JPEG by Pillow, a process for each processor"
    return [
        Row("decode images of 110 KiB", "images/s", measured.ours("images"), note=how),
        Row("decode images of 110 KiB", "MB/s", measured.ours("bytes").map(lambda b: b / 1e6)),
    ]


@dataclass(frozen=True, slots=True)
class _Setting:
    """A dataset in a store, in each form that a side reads."""

    bench: Workbench
    shape: Shape
    source: Path
    store: Store
    redis: str
    folder: Path
    memory_part: int
    """The dataset's part that memory holds is 1 / this; 0: all of it."""
    has_model: bool
    packing: Mapping[str, str]
    """The peers that could not pack, and why."""

    @property
    def memory_bytes(self) -> int:
        return self.shape.bytes // self.memory_part if self.memory_part else 0

    @property
    def options(self) -> dict[str, object]:
        """The fields of `training_program.Options`."""
        need_per_s = MODEL_PART * STORE_BYTES_PER_S
        return {
            "epochs": EPOCHS if self.has_model else EPOCHS_WITHOUT_MODEL,
            "batch": BATCH,
            "workers": WORKERS,
            "compute_s": BATCH * self.shape.file_bytes / need_per_s if self.has_model else 0.0,
            "list": str(self.folder / "list"),
        }

    def run(self, sides: Mapping[str, Side]) -> Rounds:
        """One round."""
        return alternate(1, sides)

    def stock(
        self, source: str, *prefix: str, environment: Mapping[str, str] | None = None
    ) -> dict[str, float]:
        """Run the stock script with its files at a place."""
        options = json.dumps({**self.options, "source": source})
        command = [*prefix, python_of_training(), "-P", str(_PROGRAM), options]
        epochs: list[dict[str, float]] = json.loads(_output(command, environment))
        for epoch in epochs:
            got, expected = (epoch["files"], epoch["sum"]), (self.shape.files, self.content_sum)
            assert got == expected, f"wrong contents were read: {got}, not {expected}"
        return _figures(epochs)

    @property
    def content_sum(self) -> int:
        return self.shape.content_sum()

    def local(self) -> dict[str, float]:
        self.bench.drop_page_cache(self.source)
        return self.stock(str(self.source))

    def objects(self) -> dict[str, float]:
        self.bench.warm_page_cache(self.store.bucket / _STORED)
        return self.stock(f"{self.store.endpoint}/{BUCKET}/{_STORED}")

    def mounted(self, *prefix: str) -> dict[str, float]:
        """Our mount, of a user who has nothing of the dataset yet."""
        self.bench.warm_page_cache(self.store.bucket / "datasets")
        with self.bench.scratch() as folder:
            dlcmd = Dlcmd(folder)
            dlcmd.environment |= self.store.environment
            dlcmd.environment["DIESEL_URL"] = f"s3://{BUCKET}?meta={self.redis}"
            environment = {k: v for k, v in dlcmd.environment.items() if k != "PYTHONPATH"}
            limit = ("--memory", str(self.memory_bytes)) if self.memory_part else ()
            before = self.store.counts()
            with dlcmd.mounted(_DATASET, folder / "mount", *limit):
                figures = self.stock(str(folder / "mount"), *prefix, environment=environment)
            read = self.store.counts() - before
            say(
                f"the mount read {read.bytes / self.shape.bytes:.2f} times the dataset from the"
                f" store, with {read.requests:,} requests"
            )
            return figures

    def streamed(self, peer: str) -> dict[str, float]:
        """A peer, with an empty cache on the local disk."""
        if peer in self.packing:
            raise PeerMissing(self.packing[peer])
        self.bench.warm_page_cache(self.store.bucket / peer)
        with self.bench.scratch() as folder:
            epochs = streams.train(peer, self.options, self.store, folder, self.memory_bytes)
        spare = BATCH * WORKERS  # some repeat samples, so that all workers have equally many
        for epoch in epochs:
            assert abs(epoch["files"] - self.shape.files) <= spare, f"{peer} read {epoch}"
        return _figures(epochs)


@contextmanager
def slow_store(
    folder: Path, source: Path, dataset: str, *options: str
) -> Iterator[tuple[Store, str]]:
    """A store with 5 ms and 200 MB/s that has a dataset, and the URL of its Redis."""
    served = folder / "store"
    served.mkdir()
    with (
        serving(served, delay_s=STORE_S, bytes_per_s=STORE_BYTES_PER_S) as store,
        RedisServer(folder / "redis") as redis,
    ):
        dlcmd = Dlcmd(folder / "put", store=store.bucket)
        dlcmd.environment["DIESEL_URL"] = f"{dlcmd.url}?meta={redis.url}"
        dlcmd.seconds("put", *options, str(source), dataset)
        yield store, redis.url


@contextmanager
def _setting(
    bench: Workbench, wanted: Shape, memory_part: int = 0, *, has_model: bool = True
) -> Iterator[_Setting]:
    shape, source = prepared(bench, wanted)
    with ExitStack() as stack:
        folder = stack.enter_context(bench.scratch())
        write_list(shape.paths(), folder / "list")
        say(f"packing {shape.name} for all sides")
        chunk = max(CHUNK_BYTES // bench.divisor, CHUNK_BYTES_MIN)
        options = ("--chunk-size", str(chunk))
        store, redis = stack.enter_context(slow_store(folder, source, _DATASET, *options))
        (store.bucket / _STORED).symlink_to(source)
        packing: dict[str, str] = {}
        for peer in streams.NAMES:
            shard = max(SHARD_BYTES // bench.divisor, SHARD_BYTES_MIN)
            try:
                streams.pack(peer, source, store.bucket / peer, shard)
            except PeerMissing as error:
                packing[peer] = str(error)
        yield _Setting(bench, shape, source, store, redis, folder, memory_part, has_model, packing)


def _sides(setting: _Setting) -> dict[str, Side]:
    launched = (str(PROGRAM), "-q", "run")
    sides: dict[str, Side] = {FULL: lambda: setting.mounted(*launched, "--")}
    if "--shuffle" in help_of("run"):
        sides[CHUNK] = lambda: setting.mounted(*launched, "--shuffle", "chunk", "--")
    else:
        say("NOT MEASURED: --shuffle chunk, which this version of dlcmd run does not have")
    sides |= {NO_PLAN: setting.mounted, LOCAL: setting.local, OBJECTS: setting.objects}
    for peer in streams.NAMES:
        sides[peer] = partial(setting.streamed, peer)
    return sides


def _figures(epochs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The figures of a run by name: those of the first epoch, and the mean of the later ones."""
    parts = dict(zip(_PARTS, (epochs[:1], epochs[1:]), strict=True))
    figures: dict[str, float] = {}
    for part, of in parts.items():
        seconds, waited_s = (sum(each[key] for each in of) for key in ("seconds", "waited_s"))
        figures[f"{part} {SECONDS}"] = seconds / len(of)
        figures[f"{part} {WAITED}"] = waited_s / len(of)
        figures[f"{part} {RATE}"] = sum(each["files"] for each in of) / seconds
        figures[f"{part} percent"] = 100 * waited_s / seconds
    return figures


def _time_rows(setting: _Setting, rounds: Rounds, what: str) -> list[Row]:
    """Each plan against the limits of waiting, and against each other side."""
    rows: list[Row] = []
    for part, limit in zip(_PARTS, (FIRST_WAIT_MAX, LATER_WAIT_MAX), strict=True):
        for plan in _plans(rounds):
            name = _name(setting, what, part, plan)
            measured = rounds.of(plan, f"{part} percent")
            rows.append(within(name, "% waited", measured, limit, most=True))
            rows += _against(rounds, name, plan, f"{part} {SECONDS}", SECONDS)
            if plan == FULL:
                rows += [
                    Row(
                        f"{name}, waiting", WAITED, rounds.of(plan, f"{part} {WAITED}"),
                        side, rounds.of(side, f"{part} {WAITED}"),
                    )
                    for side in _others(rounds)
                ]  # fmt: skip
    return rows


def _rate_rows(setting: _Setting, rounds: Rounds) -> list[Row]:
    rows: list[Row] = []
    for part in _PARTS:
        for plan in _plans(rounds):
            name = _name(setting, "load", part, plan)
            rows += _against(rounds, name, plan, f"{part} {RATE}", RATE, most=False)
    return rows


def _against(
    rounds: Rounds, name: str, plan: str, quantity: str, unit: str, *, most: bool = True
) -> list[Row]:
    """A plan against each other side; only those that read from the store have a target."""
    target = at_most(SLOWER_MAX) if most else at_least(1 / SLOWER_MAX)
    return [
        Row(
            name, unit, rounds.of(plan, quantity), side, rounds.of(side, quantity),
            None if side == LOCAL else target,
        )
        for side in _others(rounds)
    ]  # fmt: skip


def _plans(rounds: Rounds) -> list[str]:
    return [side for side in rounds.runs if side in SHUFFLES]


def _others(rounds: Rounds) -> list[str]:
    return [side for side in rounds.runs if side not in SHUFFLES]


def _name(setting: _Setting, what: str, part: str, plan: str) -> str:
    epochs = "first epoch" if part == _PARTS[0] else "later epochs"
    return f"{what} {setting.shape.name}, plan {SHUFFLES[plan]}, {epochs}"


def python_of_training() -> str:
    """The Python of the training environment; ours where the peers are not installed."""
    try:
        return installed("python")
    except PeerMissing:
        return sys.executable


def _output(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """The last line that a program prints. Raises CalledProcessError."""
    done = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True, timeout=DEADLINE_S
    )  # fmt: skip
    return done.stdout.splitlines()[-1]
