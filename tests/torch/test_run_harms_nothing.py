"""`dlcmd run` never makes a script worse. It replaces nothing of Python's that a script can see,
keeps nothing alive, and closes no descriptor of the script's; processes that it leaves behind end.
"""

import threading
from pathlib import Path

import pytest

from diesel_fs.torch.hook.diesel_hook.link import Link
from diesel_fs.torch.planner import PlanServer
from tests.cli.conftest import dlcmd as dlcmd
from tests.waiting import wait_until

from .test_run import FILES_OF_THE_MOUNT, mounted, python, run, streams_of

__all__ = ["dlcmd", "mounted"]

LEFT_LOOPS = f"""{FILES_OF_THE_MOUNT}
import gc, io, pickle, weakref
class Opens: opened = open
Opens().opened(Files.paths[0]).close()
assert pickle.loads(pickle.dumps(open)) is io.open is open
os.closerange(3, 256)
mine = open(sys.argv[2], "w+")
gone = []
for epoch in range(80):
    data = Files()
    loader = DataLoader(data, batch_size=10, shuffle=True)
    for batch in loader:
        break
    gone.append(weakref.ref(data))
    del data, loader
gc.collect()
assert not any(each() for each in gone)
mine.write("mine")
mine.close()
end_s = time.monotonic() + 60
streams = ["not looked yet"]
while streams and time.monotonic() < end_s:
    time.sleep(1.1)  # the mount's statistics are a second old
    with open(sys.argv[1] + "/.diesel/stats") as file:
        streams = json.load(file)["residency"]["streams"]
print(streams)
loader = DataLoader(Files(), batch_size=10, shuffle=True)
assert len(list(loader)) == 20
class Own(torch.utils.data.SequentialSampler): pass
for _ in range(2): list(DataLoader(Files(), batch_size=10, sampler=Own(range(30))))
for _ in range(4): next(iter(loader))
for _ in range(2): list(zip(range(15), loader))
"""


@pytest.mark.fuse
def test_H23_loops_that_are_left_leave_nothing(mounted: Path, tmp_path: Path) -> None:
    """The script may have closed all descriptors, and its own file may have the number of ours. The
    user gets one note on each plan that is useless or too late."""
    done = run(*python(LEFT_LOOPS), mounted, tmp_path / "mine")
    assert done.stdout == "[]\n"
    assert (tmp_path / "mine").read_text() == "mine"
    assert "announced 89 of 89 epochs" in done.stderr
    assert "the order of Own is not known before it is read" in done.stderr
    assert "leaves its epochs early, this one after 10 of 200 samples" in done.stderr
    assert len(done.stderr.splitlines()) == 4, done.stderr


FORKED = f"""{FILES_OF_THE_MOUNT}
from torch.utils.data import BatchSampler, RandomSampler
class Own(BatchSampler):
    def __iter__(self): yield from super().__iter__()
data = Files()
loader = DataLoader(data, batch_size=10, shuffle=True)
list(loader)
if os.fork() == 0:
    list(loader)
    os._exit(0)
os.wait()
mine = DataLoader(data, batch_sampler=Own(RandomSampler(data), 10, False), num_workers=2)
assert len(list(mine)) == 20
"""


@pytest.mark.fuse
def test_H23_a_loader_from_before_a_fork_and_a_sampler_that_calls_its_base(mounted: Path) -> None:
    """Each epoch is planned once, with all of its files."""
    done = run(*python(FORKED), mounted)
    assert "announced 3 of 3 epochs, 600 files" in done.stderr
    assert len(done.stderr.splitlines()) == 2, done.stderr


SPAWNED = """
import os
os.environ["PYTHONPATH"] = "/nowhere"
import sys, torch
from torch.utils.data import DataLoader
class Files(torch.utils.data.Dataset):
    def __len__(self): return 20
    def __getitem__(self, index):
        with open(sys.argv[1] + "/c0/0000") as file: file.read()
        return index
if __name__ == "__main__":
    loader = DataLoader(Files(), 5, num_workers=1, multiprocessing_context="spawn",
                        worker_init_fn=print)
    print(len(list(loader)))
"""


@pytest.mark.fuse
def test_H23_workers_that_cannot_join_still_do_their_work(mounted: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SPAWNED)
    done = run(*python("")[:1], script, mounted)
    assert done.stdout == "0\n4\n"


UNLIKE_ITS_LIST = f"""{FILES_OF_THE_MOUNT}
import random, zipfile
with zipfile.ZipFile(sys.argv[2], "w") as made: made.writestr("a", b"a")
class Cached(Files):
    kept = {{}}
    def __getitem__(self, index):
        if index not in self.kept: self.kept[index] = super().__getitem__(index)
        return self.kept[index]
class Zipped(Files):
    zip = zipfile.ZipFile(sys.argv[2])
    def __getitem__(self, index): return len(self.zip.read("a"))
class Pairs(Files):
    paths = Files.paths[:100]
    def __getitem__(self, index):
        with open(Files.paths[100 + index]) as mask: mask.seekable()
        return super().__getitem__(index)
class Redrawn(Files):
    def __init__(self): self.paths = Files.paths[:100]
    def begin(self): self.paths = random.sample(Files.paths, 100)
class Turned(Files):
    def __getitem__(self, index): return super().__getitem__(199 - index)
class Hidden(Files):
    def begin(self): self.drawn = random.sample(Files.paths, 200)
    def __getitem__(self, index):
        with open(self.drawn[index]) as file: file.seekable()
        return index
def length():
    with open(sys.argv[1] + "/.diesel/stats") as file:
        return sum(each["length"] for each in json.load(file)["residency"]["streams"])
# How long the plan of each is in the end; in the first epoch it is as long as the list.
for kind, workers, wanted in (
    (Cached, 0, 0), (Zipped, 0, 0), (Pairs, 2, 200), (Redrawn, 0, 100), (Turned, 0, 200),
    (Hidden, 0, 0),
):
    data = kind()
    loader = DataLoader(data, batch_size=10, shuffle=True, num_workers=workers)
    for epoch in range(500):
        getattr(data, "begin", str)()
        left = iter(loader)
        next(left)
        while epoch == 0 and length() != len(data): time.sleep(0.02)
        is_wanted = epoch > 2 and length() == wanted
        assert len(list(left)) == len(data) // 10 - 1
        if is_wanted: break
        time.sleep(0.02)
    else:
        raise AssertionError((kind, wanted, length()))
    del loader, left
"""


@pytest.mark.deep
@pytest.mark.fuse
def test_T1_a_dataset_that_does_not_read_its_listed_files(mounted: Path, tmp_path: Path) -> None:
    """Either the files that it opens are planned, or none, and the user gets one note."""
    messages = run(*python(UNLIKE_ITS_LIST), mounted, tmp_path / "zip").stderr
    for kind, expected in (
        ("Cached", "does not open most of its files"),
        ("Zipped", "does not open most of its files"),
        ("Turned", "opens other files than those that it lists: they are learned"),
        ("Hidden", "opens other files in each epoch: nothing is planned for it"),
    ):
        assert messages.count(f"dlcmd run: {kind} {expected}") == 1, messages
    assert "learned which files Pairs reads: those of 100 of 100 samples, 2 files each" in messages
    assert "Redrawn" not in messages
    wait_until(lambda: streams_of(mounted) == [])


def test_a_lost_path_is_reported_while_the_command_runs(tmp_path: Path) -> None:
    done = run("sh", "-c", f"PYTHONPATH=/x exec {python('')[0]} -c 'import time; time.sleep(4)'")
    assert "write PYTHONPATH=/x:$PYTHONPATH in the script" in done.stderr


def test_many_processes_join_at_once() -> None:
    """They connect before the launcher has accepted the first connection."""
    with PlanServer() as planner:
        links = [Link(str(planner.socket_path)) for _ in range(300)]
        threads = [threading.Thread(target=link.send, args=({"do": "hello"},)) for link in links]
        for each in threads:
            each.start()
        planner.start()
        for each in threads:
            each.join()
        wait_until(lambda: planner.summary.processes == len(links))
        for link in links:
            link._forget()
