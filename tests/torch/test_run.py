"""`dlcmd run`: a training command gives the same samples in the same order, and the mount knows the
order beforehand.
"""

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

import diesel_fs.torch.hook
from diesel_fs.errors import UsageError
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts import stats
from tests.cli.conftest import Dlcmd, program_environment
from tests.cli.conftest import dlcmd as dlcmd
from tests.rows import each_row
from tests.tiers import fast_first
from tests.trees import write
from tests.waiting import wait_until

HOOK = Path(diesel_fs.torch.hook.__file__).parent
TRAINING = Path(__file__).with_name("training.py")
LEARNED = Path(__file__).with_name("learned.py")
FILES = 200
DEADLINE_S = 300


@pytest.fixture
def mounted(dlcmd: Dlcmd, tmp_path: Path) -> Iterator[Path]:
    files = {f"c{n % 5}/{n:04}": bytes([n % 251]) * (1 + 17 * n) for n in range(FILES)}
    source, at = write(tmp_path / "src", files), tmp_path / "mnt"
    dlcmd("put", "--chunk-size", "64K", "--compress", "none", source, "pets")
    dlcmd("mount", "pets", at)
    yield at
    dlcmd("umount", "--force", at)


def ended(
    *command: str | Path, environment: Mapping[str, str], code: int = 0
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, env=environment, text=True, capture_output=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == code, done.stderr
    return done


def run(
    *command: str | Path,
    flags: Sequence[str] = (),
    options: Sequence[str | Path] = (),
    code: int = 0,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "dlcmd", *flags, "run", *options, "--", *command]
    return ended(*words, environment=program_environment() | environment, code=code)


def python(text: str) -> tuple[str, str, str]:
    return sys.executable, "-c", text


def running(*command: str | Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "dlcmd", "run", "--", *command],
        env=program_environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def alone_and_joined(
    script: Path, mounted: Path, workers: int, start: str, names: tuple[str, ...]
) -> tuple[dict[str, object], dict[str, object], str]:
    """The output of a script alone, its output under `dlcmd run`, and the messages of `dlcmd run`.
    Alone, its workers are always forked, which gives the same: one that is spawned takes seconds to
    import torch. `names` of loaders are given for the same reason."""
    first = [sys.executable, str(script), str(mounted), str(workers)]
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    alone = ended(*first, "fork", *names, environment=plain)
    joined = run(*first, start, *names)
    return json.loads(alone.stdout), json.loads(joined.stdout), joined.stderr


@pytest.mark.fuse
@pytest.mark.parametrize(
    ("workers", "start", "names"),
    fast_first([(2, "fork", ()), (0, "fork", ()), (1, "spawn", ("own generator", "persistent"))]),
    ids=["2-fork", "0-fork", "1-spawn"],
)
def test_each_sampler_gives_the_same_order_and_is_announced(
    mounted: Path, workers: int, start: str, names: tuple[str, ...]
) -> None:
    expected, given, messages = alone_and_joined(TRAINING, mounted, workers, start, names)
    assert given.keys() == expected.keys()
    for name in expected:
        assert given[name] == expected[name], name
    epochs = 2 * len(expected)
    assert f"announced {epochs} of {epochs} epochs" in messages
    # The only note is on an unknown order without workers.
    assert len(messages.splitlines()) == (2 if workers else 3), messages


FILES_OF_THE_MOUNT = """
import json, os, subprocess, sys, time, torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
class Files(torch.utils.data.Dataset):
    paths = [sys.argv[1] + f"/c{n % 5}/{n:04}" for n in range(200)]
    def __len__(self): return len(self.paths)
    def __getitem__(self, index):
        with open(self.paths[index], "rb") as file: self.size = len(file.read())
        return index
"""
"""How scripts begin: with a dataset that reads the files of the mount, and gives their indices."""

PLANNED = f"""{FILES_OF_THE_MOUNT}
loader = DataLoader(Files(), batch_size=10, shuffle=True)
seen = []
for epoch in range(2):
    for number, _ in enumerate(loader):
        time.sleep(0.05)
        if number == 10:
            time.sleep(1.5)
            with open(sys.argv[1] + "/.diesel/stats") as file:
                seen.append(json.load(file)["residency"]["streams"])
print(json.dumps(seen))
"""


@pytest.mark.real_start
@pytest.mark.fuse
def test_the_mount_follows_the_reader_to_the_end(mounted: Path, tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    joined = run(*python(PLANNED), mounted, options=("--report", page))
    for streams in json.loads(joined.stdout):
        [stream] = streams
        assert stream["name"].startswith("run:")
        assert stream["length"] == FILES
        assert 90 <= stream["position"] <= 130
    assert "20 batches" not in joined.stderr
    assert "40 batches: waited" in joined.stderr
    wait_until(lambda: streams_of(mounted) == [])
    text = page.read_text()
    ET.fromstring(re.sub("<meta[^>]*>|<br>", "", text.partition("\n")[2]))  # noqa: S314 (our own)
    assert "announced 2 of 2 epochs" in text
    rows = re.findall(r"<td>epoch (\d+)</td><td>(\d+)</td><td>([\d.]+)</td>", text)
    assert [(number, batches) for number, batches, _ in rows] == [("1", "20"), ("2", "20")]
    assert all(float(seconds) > 2 for *_, seconds in rows)
    assert 'class="computed"' in text


GENERATOR = ("shuffle=True", "shuffle=True, generator=torch.Generator()")


@pytest.mark.fuse
@pytest.mark.parametrize(
    ("ahead", "change", "is_foreseen"),
    fast_first(
        [
            ("1", GENERATOR, [True]),
            ("1", ("", ""), [False, True]),
            ("0", GENERATOR, [False]),
            ("1", ("range(2):", "range(2):\n    torch.rand(1)"), [False, False]),
        ],
        1,
    ),
    ids=["generator", "global generator", "not ahead", "another draw"],
)
def test_the_mount_prepares_the_next_epoch_if_it_can_be_predicted(
    mounted: Path, ahead: str, change: tuple[str, str], is_foreseen: list[bool]
) -> None:
    """With the global generator, the next epoch can be predicted only from the second one on: then
    the hook knows that the program draws nothing in between."""
    joined = run(*python(PLANNED.replace(*change, 1)), mounted, options=("--ahead", ahead))
    streams = json.loads(joined.stdout)
    assert [stream["length"] for [stream] in streams] == [FILES, FILES]
    found = [stream["frontier"] > FILES for [stream] in streams]
    assert found[: len(is_foreseen)] == is_foreseen


def streams_of(mounted: Path) -> object:
    described = stats(mounted)["residency"]
    assert isinstance(described, dict)
    return described["streams"]


JOINED = """
import sys
import diesel_fs.torch
diesel_fs.torch.join()
diesel_fs.torch.join()
exec(sys.argv[2])
"""


@pytest.mark.fuse
def test_a_script_can_join_by_itself(mounted: Path) -> None:
    joined = ended(*python(JOINED), mounted, PLANNED, environment=program_environment())
    assert [len(streams) for streams in json.loads(joined.stdout)] == [1, 1]
    assert f"announced 2 of 2 epochs, {2 * FILES} files" in joined.stderr
    wait_until(lambda: streams_of(mounted) == [])


COUNTED = """
import sys
import torch
import diesel_fs.torch
from diesel_fs.torch.join import received
diesel_fs.torch.join()
for workers in 0, 2:
    loader = torch.utils.data.DataLoader(
        range(100), batch_size=7, shuffle=True, num_workers=workers
    )
    assert received(loader.sampler) is None
    for number, batch in enumerate(loader, 1):
        assert received(loader.sampler) == received(loader.batch_sampler) == min(7 * number, 100)
        if number == 9: break
    first = iter(loader)
    assert received(loader.sampler) == 0
    next(first)
    assert received(loader.sampler) == 7
class Sorted(torch.utils.data.BatchSampler):
    def __iter__(self): return iter(sorted(super().__iter__()))
class Shard(torch.utils.data.BatchSampler):
    def __init__(self, inner): self.batch_sampler = inner
    def __iter__(self): yield from list(self.batch_sampler)[::2]
class Fails(torch.utils.data.Dataset):
    def __len__(self): return 100
    def __getitem__(self, index): return index // (0 if index == 8 else 1)
batches = torch.utils.data.BatchSampler(range(100), 4, False)
for around in Sorted(batches.sampler, 4, False), Shard(batches):
    for known, expected in (batches, 4), (around, None):
        next(iter(torch.utils.data.DataLoader(range(100), batch_sampler=known)))
        inner = batches if around.__class__ is Shard else known.sampler
        if inner.__class__ is not range:
            assert received(inner) == expected, (known, inner)
        assert received(known) == 4


loader = torch.utils.data.DataLoader(Fails(), 4)
failing = iter(loader)
next(failing), next(failing)
try: next(failing)
except ZeroDivisionError: assert received(loader.sampler) == 8
next(failing)
assert received(loader.sampler) is None
ahead = torch.utils.data.DataLoader(range(100), 4)
next(iter(ahead))
assert received(ahead.sampler) == 4
exec("next(iter(ahead))", {"__name__": "accelerate.data_loader", "ahead": ahead})
assert received(ahead.sampler) is None
late = torch.utils.data.DataLoader(range(100), 4, num_workers=1, in_order=False)
next(iter(late))
assert received(late.sampler) is None
"""


@pytest.mark.deep
def test_T2_the_samples_that_a_loop_received_are_counted() -> None:
    """`join` counts them, or `dlcmd run`; with both, `join` does nothing. Samples that are not the
    beginning of the order are not counted."""
    ended(*python(COUNTED), environment=program_environment())
    both = run(*python(COUNTED), PYTHONPATH=program_environment()["PYTHONPATH"])
    assert "diesel_fs.torch:" not in both.stderr


def test_joining_refuses_bad_arguments() -> None:
    for ahead in (-1, 8):
        with pytest.raises(UsageError, match="bad ahead"):
            diesel_fs.torch.join(ahead=ahead)
    with pytest.raises(UsageError, match="bad shuffle 'some'"):
        diesel_fs.torch.join(shuffle="some")
    with pytest.raises(UsageError, match="bad group size 0"):
        diesel_fs.torch.join(shuffle="chunk", group_size=0)


CHANGED = f"""{FILES_OF_THE_MOUNT}
root, python, source = sys.argv[1:]
def dlcmd(*words):
    subprocess.run([python, "-m", "dlcmd", *words], check=True, stdout=subprocess.DEVNULL)
files = Files()
loader = DataLoader(files)
for epoch in range(3):
    print(sum(files.size for _ in loader), flush=True)
    if epoch == 0:
        with open(source + "/a new one", "w") as file: file.write("it moves the indices")
        dlcmd("umount", root)
        dlcmd("put", source, "pets")
        dlcmd("mount", "pets", root)
"""


@pytest.mark.deep
@pytest.mark.fuse
def test_a_plan_of_another_version_is_not_made(mounted: Path) -> None:
    """Its indices are other files there. The script reads on, and the user gets a note at the
    end."""
    script = (*python(CHANGED), mounted, sys.executable, mounted.parent / "src")
    joined = run(*script, PYTHONPATH=program_environment()["PYTHONPATH"])
    assert len(set(joined.stdout.split())) == 1
    assert f"announced 1 of 3 epochs, {FILES} files" in joined.stderr
    assert "has changed to another version" in joined.stderr


RANKS = f"""{FILES_OF_THE_MOUNT}
dist.init_process_group("gloo")
sampler = DistributedSampler(Files(), seed=3)
loader = DataLoader(Files(), batch_size=10, sampler=sampler, num_workers=1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    mine = torch.cat(list(loader))
    assert mine.tolist() == list(iter(sampler))
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, mine)
    assert sorted(torch.cat(all_of_them).tolist()) == list(range(200))
dist.destroy_process_group()
"""


@pytest.mark.deep
@pytest.mark.fuse
def test_the_ranks_of_torchrun_are_joined(mounted: Path, tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    joined = run(sys.executable, *torchrun, script, mounted)
    assert f"announced 4 of 4 epochs, {2 * FILES} files" in joined.stderr
    assert "40 batches" in joined.stderr


SEEDED = f"""{FILES_OF_THE_MOUNT}
torch.manual_seed(7)
loader = DataLoader(Files(), batch_size=16, shuffle=True)
for _ in range(2): print(*torch.cat(list(loader)).tolist())
loader.sampler.generator.get_state()
"""


def orders_of(*options: str, mounted: Path, code: int = 0) -> tuple[list[list[int]], str]:
    joined = run(*python(SEEDED), mounted, options=options, code=code)
    return [[*map(int, line.split())] for line in joined.stdout.splitlines()], joined.stderr


@pytest.mark.deep
@pytest.mark.fuse
def test_an_order_can_be_chunk_wise_and_a_generator_the_samplers_own(mounted: Path) -> None:
    """The seed of each depends on the script's."""
    [plain, _], _ = orders_of(mounted=mounted, code=1)  # there is no generator
    orders, _ = orders_of("--own-seed", mounted=mounted)
    assert orders[0] != orders[1]
    assert plain not in orders
    assert orders_of("--own-seed", mounted=mounted)[0] == orders
    by_chunks = ("--own-seed", "--shuffle", "chunk", "--group-size", "1")
    chunk_wise, messages = orders_of(*by_chunks, mounted=mounted)
    assert "announced 2 of 2 epochs" in messages
    assert "keeps its order" not in messages
    snapshot = Snapshot((mounted / ".diesel" / "snapshot").read_bytes())
    paths = [f"c{index % 5}/{index:04}".encode() for index in range(FILES)]
    chunk_of = snapshot.chunk_of(snapshot.lookup_many(paths))
    for order in (*orders, *chunk_wise):
        assert sorted(order) == [*range(FILES)]
        changes = np.count_nonzero(np.diff(chunk_of[order]))
        assert changes < 8 if order in chunk_wise else changes > 30
    assert chunk_wise[0] != chunk_wise[1]
    assert orders_of(*by_chunks, mounted=mounted)[0] == chunk_wise


def test_a_report_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    """The error comes before the command runs; a later failure changes no exit code."""
    page = tmp_path / "run.html"
    run("true", os.fsdecode(b"\xff"), options=("--report", page))
    assert "true " in page.read_text(encoding="utf-8")
    early = run(*python("print(1)"), options=("--report", tmp_path / "none/run.html"), code=2)
    assert early.stdout == ""
    assert "cannot write the report" in early.stderr
    late = run(*python("exit(7)"), options=("--report", "/dev/full"), code=7)
    assert "cannot write the report /dev/full: No space left on device" in late.stderr


GONE = f"""{FILES_OF_THE_MOUNT}
for number, _ in enumerate(DataLoader(Files(), batch_size=10)):
    if number == 10:
        subprocess.run([sys.executable, "-m", "dlcmd", "umount", "--lazy", sys.argv[1]], check=True)
"""


@pytest.mark.fuse
def test_a_mount_that_goes_away_is_named(mounted: Path, dlcmd: Dlcmd) -> None:
    path = program_environment()["PYTHONPATH"]
    messages = run(*python(GONE), mounted, PYTHONPATH=path, code=1).stderr
    assert "FileNotFoundError" in messages
    assert f"the mount on {mounted} has gone" in messages.splitlines()[-1]
    dlcmd("mount", "pets", mounted)


LEARNED_FILES = {"pairs": 200, "native": 100, "batches": 200, "subset": 100, "parts": 60}
"""The files of an epoch of each loader of `learned.py` that reads any."""


@pytest.mark.fuse
@pytest.mark.parametrize(
    ("workers", "start", "names"),
    fast_first([(2, "fork", ()), (0, "fork", ()), (1, "spawn", ("pairs", "parts"))]),
    ids=["2-fork", "0-fork", "1-spawn"],
)
def test_the_files_that_a_dataset_opens_are_learned_in_its_first_epoch(
    mounted: Path, workers: int, start: str, names: tuple[str, ...]
) -> None:
    expected, given, messages = alone_and_joined(LEARNED, mounted, workers, start, names)
    assert given == expected
    [(epochs, files)] = re.findall(r"announced (\d+) of \d+ epochs, ([\d,]+) files", messages)
    # The files that workers learn at the end of the first epoch may come too late for the second.
    assert int(epochs) >= 3 * len(given.keys() & LEARNED_FILES)
    assert int(files.replace(",", "")) >= 2 * sum(LEARNED_FILES.get(name, 0) for name in given)
    assert "reads: those of 100 of 100 samples, 2 files each" in messages


PARTLY = """
import sys, torch
class Files(torch.utils.data.Dataset):
    samples = [(sys.argv[1] + f"/c{n % 5}/{n:04}", 0) for n in range(50)] + [(__file__, 0)] * 50
    def __len__(self): return len(self.samples)
    def __getitem__(self, index): return index
class Unknown(torch.utils.data.Dataset):
    def __len__(self): return 10
    def __getitem__(self, index): return index
class Endless(torch.utils.data.IterableDataset):
    def __iter__(self): return iter(range(3))
for data in Files(), Unknown(), Endless(): list(torch.utils.data.DataLoader(data, batch_size=4))
"""


@pytest.mark.fuse
def test_unplannable_datasets_are_named(mounted: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PARTLY)
    joined = run(sys.executable, script, mounted)
    assert "announced 1 of 2 epochs, 50 files" in joined.stderr
    assert "50 of 100 files of a dataset lie in no mount" in joined.stderr
    assert "Unknown opened no visible file of a mount" in joined.stderr
    assert "the files of Endless are not known" in joined.stderr


def test_exit_codes_and_output_pass_through() -> None:
    assert run(*python("import sys; print('out'); sys.exit(7)"), code=7).stdout == "out\n"
    run(*python("import os; os.kill(os.getpid(), 9)"), code=128 + 9)
    missing = "dlcmd run: cannot start '/no/such/program': No such file or directory\n"
    assert run("/no/such/program", code=127).stderr == missing
    run("/etc/passwd", code=126)
    assert run(*python("pass"), flags=("-q",)).stderr == ""
    run(code=2)
    words = shlex.join([sys.executable, "-m", "dlcmd", "run", "--", *python("exit(7)")])
    for nowhere in ("2>&-", "2>/dev/full"):
        script = ["sh", "-c", f"exec {words} {nowhere}"]
        assert subprocess.run(script, env=program_environment(), check=False).returncode == 7


def test_a_long_temporary_folder_and_leftovers_in_one(tmp_path: Path) -> None:
    deep, flat = tmp_path / ("x" * 120), Path(tempfile.mkdtemp(prefix="flat"))
    deep.mkdir()
    for folder in (deep, flat):
        result = run(*python("import os; print(os.environ['DIESEL_JOIN'])"), TMPDIR=str(folder))
        assert (json.loads(result.stdout)["socket"].startswith(str(folder))) == (folder == flat)
        assert os.listdir(folder) == []
    flat.rmdir()


@each_row("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_are_passed_on(number: signal.Signals) -> None:
    program = (
        "import signal, sys, time\n"
        f"signal.signal({number}, lambda number, _: sys.exit(number))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    with running(*python(program)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.wait(20) == number


def test_a_python_that_ignores_the_environment_is_named() -> None:
    for flag in ("-I", "-E", "-S"):
        alone = run(sys.executable, flag, "-c", "print(1)")
        assert alone.stdout == "1\n"
        assert "no Python process of the command could be joined" in alone.stderr
    assert "no DataLoader" in run(*python("print(1)")).stderr
    assert "no Python process" in run("true").stderr


def test_another_sitecustomize_runs_and_nothing_is_left_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.was_here = 5\n")
    text = "import sys; print(was_here, [p for p in sys.path if 'hook' in p])"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    assert run(*python(text), PYTHONPATH=path).stdout == "5 []\n"


def test_a_launcher_that_is_killed_does_not_end_the_command(tmp_path: Path) -> None:
    script, go = tmp_path / "script.py", tmp_path / "go"
    script.write_text(
        "import os, time, torch\n"
        "print(os.getppid(), flush=True)\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.05)\n"
        "print(len(list(torch.utils.data.DataLoader(range(40), shuffle=True))), flush=True)\n"
    )
    with running(sys.executable, script) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        process.kill()
        wait_until(lambda: process.poll() is not None)
        go.touch()
        assert process.stdout.readline() == b"40\n"


def test_the_hook_needs_python_3_9_and_its_standard_library_only() -> None:
    paths = sorted(HOOK.rglob("*.py"))
    assert len(paths) > 5
    for path in paths:
        tree = ast.parse(path.read_text(), feature_version=(3, 9))
        for node in ast.walk(tree):
            assert not isinstance(node, ast.Match), path
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            for name in names:
                assert name.partition(".")[0] in sys.stdlib_module_names, (path, name)


TUNED = f"""{FILES_OF_THE_MOUNT}
from diesel_fs.torch import AutoDataLoader, ChunkShuffleSampler, DieselDataset
class Script:
    numbers = [2, 1, 2, 1]
    def decide(self, measured): return self.numbers.pop(0) if self.numbers else measured.workers
for data in Files(), DieselDataset("pets", loader=len, is_valid_file=bool, url=sys.argv[2]):
    sampler = ChunkShuffleSampler(data, group_size=2)
    loader = AutoDataLoader(
        data, batch_size=10, sampler=sampler, num_workers=1, tune_every=3, controller=Script(),
        multiprocessing_context="fork",
    )
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert len(list(loader)) == 20
"""


@pytest.mark.fuse
def test_a_loader_that_tunes_itself_is_one_stream(mounted: Path, dlcmd: Dlcmd) -> None:
    """Its orders are announced whole, although its workers change. A dataset that reads no mount is
    not announced to any."""
    joined = run(*python(TUNED), mounted, dlcmd.store.as_uri())
    assert f"announced 2 of 2 epochs, {2 * FILES} files" in joined.stderr
    assert len(joined.stderr.splitlines()) == 2, "there is no note"


def test_turns_of_many_workers_change_neither_samples_nor_random_numbers(mounted: Path) -> None:
    """Six workers that compute, on one processor, also when an epoch is left early, and with
    persistent workers. The user learns that fewer are enough."""
    script = f"""
import os, random, torch
os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
from pathlib import Path
from time import process_time
from torch.utils.data import DataLoader
torch.manual_seed(5)
random.seed(5)

class Files:
    samples = sorted(map(str, Path({str(mounted)!r}).glob("c*/*")))
    def __len__(self): return len(self.samples)
    def __getitem__(self, index):
        content, end_s = Path(self.samples[index]).read_bytes(), process_time() + 0.002
        while process_time() < end_s:
            pass
        return len(content), index, torch.rand(()).item(), random.random()

for persistent in (False, True):
    loader = DataLoader(
        Files(), 5, shuffle=True, num_workers=6, collate_fn=list, persistent_workers=persistent
    )
    for epoch in range(3):
        for number, batch in enumerate(loader):
            print(batch)
            if epoch == 1 and number == 9:
                break
"""
    plain = ended(*python(script), environment=program_environment())
    planned = run(*python(script))
    assert planned.stdout == plain.stdout
    assert planned.stdout.count("\n") == 180
    assert "6 workers of a DataLoader are more than 1 processors can use" in planned.stderr
