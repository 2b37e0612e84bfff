"""`dlcmd doctor` names planted faults and their cures, and leaves nothing behind.

A table of values tests the meaning of facts. Real faults test how facts are found. If a fault
needs a namespace, the program runs in one; there it does not see the mounts of other tests,
which may be dying.
"""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import pytest

from diesel_fs.cache.disk.marker import prepare_cache_folder
from diesel_fs.credentials import Credentials
from diesel_fs.errors import ObjectStoreError
from diesel_fs.mounts import launcher, stats
from diesel_fs.mounts.mountpoints.mountpoint import DatasetMount
from diesel_fs.mounts.mountpoints.processes import children_of
from diesel_fs.storage.accounts.account import Account, Role
from diesel_fs.storage.metadata.redis.link import ServerFacts
from diesel_fs.storage.objects.store import encode_marker
from diesel_fs.system.mountinfo import MountEntry
from dlcmd.doctor import checks
from dlcmd.doctor.findings import Finding, finding_lines, summary
from dlcmd.doctor.places import mount_probes
from dlcmd.doctor.probes import Emit, Probe, run_probes
from dlcmd.main import run
from tests.bench.control_group import control_group
from tests.mounts.conftest import open_place as open_place
from tests.own_mounts import own_mounts
from tests.rows import each_row
from tests.server.program import Server, new_repository
from tests.small_disks import small_disk
from tests.storage.metadata.redis_servers import RedisServer, free_port
from tests.storage.objects.s3_server import credentials, without_proxies
from tests.storage.objects.scripted_s3 import BUCKET, Rule, ScriptedS3, Stored
from tests.trees import facts, write
from tests.unprivileged_user import as_user, module_path, needs_root, user_python

from .conftest import Dlcmd, program_environment
from .test_clocks import clock

OUR_PATH = os.pathsep.join(filter(None, sys.path))


@dataclass(frozen=True, slots=True)
class Answer:
    code: int
    findings: Sequence[Mapping[str, object]]
    err: str

    def one(self, check: str, state: str, *texts: str, cure: str = "") -> Mapping[str, object]:
        """The finding of this check and state that has all these texts, and the cure."""
        same = [each for each in self.findings if (each["check"], each["state"]) == (check, state)]
        found = [each for each in same if all(text in str(each["found"]) for text in texts)]
        assert found, (check, state, texts, self)
        assert cure in str(found[0]["cure"]), found[0]
        assert found[0]["cure"] or state != "fault"
        return found[0]

    @property
    def faults(self) -> list[str]:
        return [str(each["check"]) for each in self.findings if each["state"] == "fault"]


def parsed(code: int, out: bytes, err: str) -> Answer:
    assert out, err
    answer = json.loads(out)
    assert (code == 0) == answer["runs_well"] == (answer["faults"] == 0), answer
    assert code in (0, 3), err
    assert "Traceback" not in err
    return Answer(code, answer["findings"], err)


def by_program(*words: str | Path, environment: Mapping[str, str]) -> Answer:
    done = subprocess.run(
        [sys.executable, "-m", "dlcmd", "doctor", "--json", *words],
        check=False, capture_output=True, timeout=60, env=environment,
    )  # fmt: skip
    return parsed(done.returncode, done.stdout, done.stderr.decode())


def examined(
    *words: str | Path,
    before: str = "",
    prefix: Sequence[str] = (),
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
) -> Answer:
    """The answer of the program in a mount namespace of its own, after the commands `before`;
    `prefix` stands before the program."""
    command = [*prefix, python, "-m", "dlcmd", "doctor", "--json", *map(str, words)]
    script = f"set -e\n{before}\nexec {shlex.join(command)}"
    done = subprocess.run(
        [*own_mounts("--propagation", "private"), "sh", "-c", script],
        check=False, capture_output=True, timeout=60,
        env={**without_proxies(), "PYTHONPATH": OUR_PATH, **(environment or {})},
    )  # fmt: skip
    assert done.stdout, done.stderr.decode()
    return parsed(done.returncode, done.stdout, done.stderr.decode())


@pytest.fixture
def pets(dlcmd: Dlcmd, tmp_path: Path) -> Dlcmd:
    dlcmd("put", write(tmp_path / "src", {"a": b"1", "b": b"2" * 5000}), "pets")
    return dlcmd


class Doctor(Protocol):
    def __call__(self, *words: str | Path) -> Answer: ...


@pytest.fixture
def doctor(capfdbinary: pytest.CaptureFixture[bytes]) -> Doctor:
    """Runs the doctor in this process, without the trial mount. The mounts of other tests may add
    findings."""

    def examine(*words: str | Path) -> Answer:
        capfdbinary.readouterr()
        code = run(["doctor", "--json", "--quick", *map(str, words)])
        captured = capfdbinary.readouterr()
        return parsed(code, captured.out, captured.err.decode())

    return examine


@needs_root
@pytest.mark.fuse
def test_a_machine_without_faults_gets_0_and_nothing_is_left(pets: Dlcmd, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    before = facts(pets.store, times=False)
    answered = examined(environment={"TMPDIR": str(tmp_path / "tmp")})
    assert (answered.code, answered.faults) == (0, []), answered
    session = answered.one("session", "ok", "a mount works, with the session")
    assert "session native" in str(session) or "session kernel" in str(session)
    for check in ("fuse.device", "memory", "files", "store", "store.latency", "store.bandwidth",
                  "store.rights", "metadata", "clock", "folder.state", "folder.cache",
                  "folder.tmp"):  # fmt: skip
        answered.one(check, "ok")
    assert os.listdir(tmp_path / "tmp") == []
    assert examined("--write", "--quick").one("store.rights", "ok", "tried")
    assert facts(pets.store, times=False) == before


def test_the_worst_comes_first_and_the_cure_stands_below() -> None:
    gone = Finding("store", "fault", "it is gone", "bring it back")
    late, enough = Finding("clock", "warning", "it is late"), Finding("files", "ok", "enough")
    lines = [" ".join(line.split()) for line in finding_lines([enough, gone, late])]
    assert lines == [
        "fault store it is gone", "do: bring it back", "warning clock it is late",
        "ok files enough",
    ]  # fmt: skip
    answered = summary([enough, gone, late])
    assert answered == "a job would not run well here (1 fault and 1 warning)"
    assert summary([enough]) == "a job would run well here"


def test_a_new_user_begins(doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    doctor().one("store", "warning", "there is no repository yet", cure="dlcmd put")
    assert not (tmp_path / "data").exists()


def test_a_check_that_hangs_is_left_behind_and_its_earlier_findings_count() -> None:
    never = threading.Event()
    begun = Finding("store", "ok", "it can be read")

    def hang(emit: Emit) -> None:
        emit(begun)
        never.wait()

    def fail(_: Emit) -> None:
        raise ObjectStoreError("it is gone", advice="bring it back")

    def fill(_: Emit) -> None:
        Path("/dev/full").write_bytes(b"x")

    *found, full = run_probes(
        [
            Probe("store", "the store", hang, "look at it", 0.05),
            Probe("meta", "it", fail, "none"),
            Probe("session", "a mount", fill, "none"),
        ]
    )
    never.set()
    assert found == [
        begun,
        Finding("store", "fault", "the store has not answered within 0 s", "look at it"),
        Finding("meta", "fault", "it is gone", "bring it back"),
    ]
    assert (full.state, full.found) == ("fault", "No space left on device"), (
        "a full disk is a fault, not a bug"
    )
    assert full.cure.startswith("free some space there")


@needs_root
def test_no_temporary_file_can_be_written() -> None:
    lock = "mount --bind $at $at; mount -o remount,bind,ro $at"
    answered = examined(before=f"for at in /var/tmp /tmp; do {lock}; done; cd /tmp")
    answered.one(
        "folder.tmp", "fault", "Read-only file system", cure="name another folder in TMPDIR"
    )
    answered.one("session", "fault", "no mount can be tried", cure="name another folder in TMPDIR")


@needs_root
def test_a_missing_proc_is_named_and_nothing_else_is_blamed(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "DIESEL_URL": "file:///nowhere"}
    answered = examined("--quick", before="umount -l /proc", environment=home)
    answered.one("cache.old", "fault", "/proc/sys/kernel/random/boot_id: No such file")
    assert not [each for each in answered.faults if each.startswith(("folder.", "fuse.", "memory"))]


@needs_root
def test_no_thread_can_be_started(open_home: Mapping[str, str]) -> None:
    prefix = ["prlimit", "--nproc=1", "--", *as_user()]
    answered = examined("--quick", prefix=prefix, python=user_python(), environment=open_home)
    answered.one("folder.tmp", "fault", "there is no memory or no process left", cure="`ulimit -u`")


def fuse(facts: checks.FuseFacts) -> Finding:
    [found] = [each for each in checks.fuse_findings(facts) if each.state == "fault"]
    return found


def mount(state: str) -> Finding:
    [found] = checks.mount_findings(checks.MountFacts("/mnt", "pets@7", state))
    return found


FUSE = checks.FuseFacts()
DISK = checks.FolderFacts("state", "logs", "/x", free_bytes=1 << 40, free_files=20)
REDIS = ServerFacts("7.0", "noeviction", used_bytes=500, limit_bytes=540, keeps_log=True)


@each_row(
    ("found", "state", "text", "cure"),
    [
        (fuse(replace(FUSE, device_errno="ENOENT")), "fault", "no /dev/fuse", "modprobe fuse"),
        (fuse(replace(FUSE, device_errno="ENXIO")), "fault", "no driver", "modprobe fuse"),
        (fuse(replace(FUSE, is_root=False)), "fault", "no fusermount3", "install fuse3"),
        (mount("dead"), "fault", "is dead: nothing serves it", "`dlcmd umount /mnt`"),
        (mount("hung"), "fault", "does not answer", "`dlcmd umount --force /mnt`"),
        (checks.folder_finding(DISK), "fault", "takes only 20", "folder in XDG_STATE_HOME"),
        (checks.clock_finding(-600, "it"), "fault", "600.0 s behind", "set the clock right"),
        (checks.clock_finding(600, "it", 599), "ok", "agrees", ""),
        (checks.redis_finding(REDIS, "it"), "fault", "it will refuse writes", "maxmemory"),
    ],
)
def test_the_meaning_of_facts(found: Finding, state: str, text: str, cure: str) -> None:
    assert found.state == state
    assert text in found.found
    assert cure in found.cure


DEVICES = """
mkdir "$DEV"; mount -t tmpfs dev "$DEV"; mknod -m 600 "$DEV/f" c 10 229
mount --bind "$DEV/f" /dev/fuse
cp $HELPER "$DEV/helper"; chmod 755 "$DEV/helper"; mount --bind "$DEV/helper" $HELPER
"""


@needs_root
@pytest.mark.fuse
def test_a_user_may_neither_use_the_device_nor_fusermount3(open_home: Mapping[str, str]) -> None:
    """The user may open only few files, too."""
    helper = str(shutil.which("fusermount3"))
    answered = examined(
        before=DEVICES,
        prefix=["prlimit", "--nofile=200:4000", "--", *as_user()],
        python=user_python(),
        environment={**open_home, "DEV": f"{open_home['HOME']}/dev", "HELPER": helper},
    )
    refused = ("this user may not open /dev/fuse", "nothing can be mounted")
    answered.one("fuse.device", "fault", *refused, cure="chmod 666 /dev/fuse")
    answered.one("fuse.rights", "fault", "is not setuid", cure="chmod u+s")
    answered.one("files", "fault", "may open 200 files", cure="`ulimit -n 4000`")
    assert "session" not in {each["check"] for each in answered.findings}


@pytest.fixture
def open_home(open_place: Path) -> dict[str, str]:
    """The environment of a user without rights, with a home of the user's own, in which another
    interpreter finds the modules of the program."""
    folders = {f"XDG_{kind}_HOME": f"{open_place}/{kind}" for kind in ("STATE", "CACHE", "CONFIG")}
    path = os.pathsep.join([module_path(), str(Path(__file__).parents[2] / "cli")])
    place = {"HOME": str(open_place), "DIESEL_URL": "file:///nowhere", "PYTHONPATH": path}
    return folders | place


@needs_root
def test_too_small_a_memory_limit() -> None:
    with control_group() as group:
        if group is None:
            pytest.skip("no control group can be made here")
        for name in ("memory.limit_in_bytes", "memory.max"):
            if (group.folder / name).exists():
                (group.folder / name).write_text(str(200 << 20))
        answered = examined("--quick", prefix=group.prefix)
    answered.one(
        "memory", "fault", "209.7 MB", "a mount needs 268.4 MB", cure="raise the memory limit"
    )


@needs_root
def test_a_full_disk(doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk(tmp_path / "disk", "size=1m,nr_inodes=20") as disk:
        monkeypatch.setenv("XDG_STATE_HOME", str(disk))
        answered = doctor()
    cure = "name another folder in XDG_STATE_HOME"
    answered.one("folder.state", "fault", "the disk is full", cure=cure)


def test_folders_of_the_user(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may write to one, and earlier boots have left copies in another."""
    for kind in ("STATE", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / kind))
    folder = tmp_path / "STATE/diesel"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    copies = tmp_path / "CACHE/diesel/snapshots"
    old = f"{'0' * 32}-{'0' * 16}.00000000-0000-0000-0000-000000000000"
    write(copies, {old: os.urandom(9 << 20)})
    answered = doctor()
    answered.one("folder.state", "fault", "others can write", cure=f"`chmod 700 {folder}`")
    cure = str(answered.one("cache.old", "warning", "1 file of earlier boots")["cure"])
    subprocess.run(shlex.split(cure.strip("`")), check=True)
    assert os.listdir(copies) == []
    write(tmp_path / "CONFIG/diesel", {"config.toml": b"colour = 'red'\n"})
    doctor().one("settings", "fault", "unknown key 'colour'", cure="known:")


@contextmanager
def mounted(pets: Dlcmd, at: Path) -> Iterator[list[int]]:
    pets("mount", "pets", at)
    try:
        pid = stats(at)["pid"]
        assert isinstance(pid, int)
        yield [pid, *children_of(pid)]
    finally:
        launcher.umount(at, force=True)


@each_row("is_named", [True, False])
def test_a_fault_of_a_mount_that_was_not_named_is_a_warning(is_named: bool) -> None:
    tree = MountEntry(9, 1, "0:9", "/mnt/theirs", "fuse.diesel", "pets@7", frozenset())
    [probe] = mount_probes([DatasetMount(tree, tree)], is_named=is_named)
    bad, good = Finding("mount", "fault", "it is dead", "end it"), Finding("mount", "ok", "alive")
    states = [each.state for each in probe.findings([bad, good], is_late=True)]
    worst = "fault" if is_named else "warning"
    assert states == [worst, "ok", worst]


@pytest.mark.deep
@needs_root
@pytest.mark.fuse
@pytest.mark.parametrize(
    ("number", "found", "cure"),
    [
        (signal.SIGKILL, "is dead: nothing serves it", "`dlcmd umount {}`"),
        (signal.SIGSTOP, "does not answer", "`dlcmd umount --force {}`"),
    ],
    ids=["dead", "hung"],
)
def test_a_mount_whose_processes_have_ended_or_stopped(
    number: int, found: str, cure: str, pets: Dlcmd, doctor: Doctor, tmp_path: Path
) -> None:
    at = tmp_path / "mnt"
    with mounted(pets, at) as pids:
        for each in (signal.SIGSTOP, number):  # so that none acts on the death of another
            for pid in pids:
                os.kill(pid, each)
        answered = doctor(at / "deeper")
        answered.one("mount", "fault", f"on {at}", found, cure=cure.format(at))
        if number == signal.SIGKILL:  # without naming it, too
            doctor().one("mount", "warning", f"on {at}", found)
        code, message = (10, "has ended") if number == signal.SIGKILL else (14, "does not answer")
        assert message in pets.program("top", "--count", "1", at, code=code).err


@needs_root
@pytest.mark.fuse
def test_a_mount_behind_the_current_version(pets: Dlcmd, doctor: Doctor, tmp_path: Path) -> None:
    at = tmp_path / "mnt"
    with mounted(pets, at):
        before = doctor(at)
        before.one("mount", "ok", f"on {at} is alive, with the session")
        assert "mount.stale" not in {each["check"] for each in before.findings}
        (tmp_path / "link").symlink_to("mnt")
        assert "place" not in {each["check"] for each in doctor(tmp_path / "link").findings}
        pets("put", write(tmp_path / "more", {"c": b"3"}), "pets")
        answered = doctor(at)
        answered.one("mount.stale", "warning", "is current", cure=f"`dlcmd umount {at}`")
        pets("delete-dataset", "pets", "--yes")
        doctor(at).one("mount.stale", "warning", "has no dataset 'pets'", cure="--url")


def test_folders_for_no_mount_and_no_cache(pets: Dlcmd, doctor: Doctor, tmp_path: Path) -> None:
    file = write(tmp_path / "full", {"file": b""}) / "file"
    doctor(file).one("place", "fault", "is no folder", cure="name a folder")
    doctor(file.parent).one("place", "fault", "it holds 'file'", cure="name an empty folder")
    doctor(pets.store).one("place", "fault", "is the store", cure="dlcmd doctor file://")
    quiet = pets("doctor", "--quick", file.parent, "-q", code=3)
    assert "a job would not run well here" in quiet.err


@needs_root
def test_a_folder_of_another_user(open_home: Mapping[str, str], tmp_path: Path) -> None:
    at = Path(open_home["HOME"]) / "roots"
    at.mkdir()
    answered = examined(
        "--quick", at / "mnt", prefix=as_user(), python=user_python(), environment=open_home
    )
    answered.one("place", "fault", "cannot be made", cure="a folder of your own")


@needs_root
def test_a_cache_on_a_full_disk_and_an_unused_one(doctor: Doctor, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=10m") as disk:
        cache = prepare_cache_folder(disk / "cache")
        dataset = cache / ("1" * 32) / ("2" * 32)
        write(dataset, {".used": b"", "3" * 32: os.urandom((10 << 20) - (400 << 10))})
        long_ago_s = time.time() - 40 * 86_400
        os.utime(dataset / ".used", (long_ago_s, long_ago_s))
        answered = doctor(cache)
        answered.one("place", "ok", "is a cache with")
        answered.one("place.cache", "fault", "is full", cure="free some space")
        answered.one("cache.old", "warning", "for 40 days", cure=f"`rm -r {dataset}`")
        cache.chmod(0o777)
        doctor(cache).one("place.cache", "fault", "others can write", cure="chmod 700")


def test_no_repository_is_at_the_address(dlcmd: Dlcmd, doctor: Doctor) -> None:
    answered = doctor(dlcmd.store.as_uri())
    answered.one("store", "fault", "no DIESEL-FS store is here", cure="check the path")
    doctor("file://host/x").one("settings", "fault", "bad repository URL")


@needs_root
def test_a_read_only_store(pets: Dlcmd) -> None:
    """Jobs can read it, so it is a fault only if a write is tried."""
    store = shlex.quote(str(pets.store))
    before = f"mount --bind {store} {store}; mount -o remount,bind,ro {store}"
    answered = examined("--quick", before=before)
    assert answered.code == 0
    answered.one("store.rights", "warning", "not write to it (Read-only", cure="the right to write")
    answered = examined("--write", "--quick", before=before)
    answered.one("store.rights", "fault", "Read-only", cure="the right to write")


def test_a_clock_that_is_off(pets: Dlcmd) -> None:
    answered = by_program("--quick", environment={**program_environment(), **clock("+600s")})
    answered.one("clock", "fault", "600.0 s ahead of", cure="set the clock right")


def test_redis_faults(
    pets: Dlcmd, doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RedisServer(tmp_path / "redis", port=free_port()) as redis:
        url = f"{pets.store.as_uri()}?meta={redis.tcp_url}"
        pets("--url", url, "recover", "pets")
        answered = doctor(url)
        answered.one("metadata", "warning", "keeps no log", cure="appendonly yes")
        answered.one("metadata.latency", "ok", "answers in")
        answered.one("clock", "ok", "Redis at 127.0.0.1")
        with redis.client() as client:
            used = int(client.info("memory")["used_memory"])
            client.config_set("maxmemory", used // 2)
            doctor(url).one("metadata", "fault", "will refuse writes", cure="maxmemory")
            client.config_set("maxmemory", 0)
            client.config_set("requirepass", "canary-of-redis")
            monkeypatch.setenv("DIESEL_REDIS_PASSWORD", "canary-that-is-wrong")
            answered = doctor(url)
            answered.one("metadata", "fault", "does not accept", cure="DIESEL_REDIS_PASSWORD")
            assert "canary" not in str(answered)
        redis.kill()
        doctor(url).one("metadata", "fault", "cannot reach", cure="check that the metadata")


def marker() -> Stored:
    return Stored(encode_marker(uuid.uuid4()), time.time())


def of_bucket(s3: ScriptedS3, *words: str) -> Answer:
    environment = {**without_proxies(), **credentials(s3.endpoint), "PYTHONPATH": OUR_PATH}
    return by_program(*words, f"s3://{BUCKET}/pre", environment=environment)


def test_a_bucket_that_is_slow_and_has_no_metadata_store() -> None:
    with ScriptedS3() as s3:
        s3.objects["pre/DIESEL-STORE"] = marker()
        s3.delay_s = 0.25
        answered = of_bucket(s3, "--quick")
    answered.one("store.latency", "warning", "ms is slow", cure="--cache-dir or --task")
    answered.one("metadata", "warning", "names no metadata store", cure="add ?meta=redis://")
    answered.one("store.datasets", "warning", "no dataset", cure="dlcmd put")
    answered.one("store.rights", "ok", "not tried", cure="--write")
    answered.one("clock", "ok", "the object store at 127.0.0.1")


@each_row(
    ("status", "code", "found", "cure"),
    [
        (404, "NoSuchBucket", "no such bucket", "check its name"),
        (403, "InvalidAccessKeyId", "", ""),
        (403, "RequestTimeTooSkewed", "", "clock is wrong by minutes"),
    ],
)
def test_a_bucket_that_refuses(status: int, code: str, found: str, cure: str) -> None:
    with ScriptedS3(Rule("GET", "DIESEL-STORE", status=status, code=code)) as s3:
        of_bucket(s3, "--quick").one("store", "fault", found, cure=cure)


def test_a_bucket_that_takes_no_writes() -> None:
    with ScriptedS3(Rule("PUT", "/leases/", status=403, code="AccessDenied")) as s3:
        s3.objects["pre/DIESEL-STORE"] = marker()
        answered = of_bucket(s3, "--write", "--quick")
        answered.one("store.rights", "fault", "not write to it", cure="the right to write")
        of_bucket(s3, "--write", "--quick").one("store.rights", "ok", "(tried)")
        assert set(s3.objects) == {"pre/DIESEL-STORE"}


def test_an_endpoint_at_which_nothing_listens_and_one_that_is_silent() -> None:
    unreachable = ("store", "fault", "cannot be reached")
    with ScriptedS3() as s3, socket.create_server(("127.0.0.1", 0)) as silent:
        s3.stop()
        of_bucket(s3, "--quick").one(*unreachable, cure="AWS_ENDPOINT_URL")
        s3.endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        of_bucket(s3, "--quick").one(*unreachable, "timed out", cure="check the network")


Site = tuple[str, dict[str, Credentials]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    url = (folder / "store").as_uri()
    reader = Account("ann", b"\0" * 32, grants={"pets": Role.READ})
    users = new_repository(url, "root", reader)
    source = write(folder / "src", {"a": os.urandom(3 << 20)})
    assert run(["-q", "--url", url, "put", str(source), "pets"]) == 0
    with Server(folder / "server", "--store", url) as server:
        yield server.url, users


def log_in(user: Credentials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIESEL_USER", user.user)
    monkeypatch.setenv("DIESEL_KEY", user.key_text)


def test_the_roles_of_a_user(site: Site, doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    url, users = site
    log_in(users["ann"], monkeypatch)
    answered = by_program(url, environment=program_environment())
    answered.one("store", "ok", "accepts the user 'ann', who may read 1 dataset")
    came = {
        str(each["found"])[:26] for each in answered.findings if each["check"] == "store.bandwidth"
    }
    assert came == {"3.1 MB of a chunk came at "}  # its rate depends on other programs
    answered.one("clock", "ok", "the server at 127.0.0.1")
    answered = doctor("--write", url)
    answered.one("store.rights", "fault", "not write, pets", cure="`dlcmd grant pets ann write`")
    log_in(users["root"], monkeypatch)
    doctor("--write", url).one("store.rights", "ok", "read and write 1 dataset (tried)")


def test_logins(
    site: Site, doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, users = site
    doctor(url).one("store", "fault", "no user is named", cure="--user and --key-file")
    key = tmp_path / "key"
    key.write_text(users["ann"].key_text)
    key.chmod(0o644)
    answered = doctor("--user", "ann", "--key-file", key, url)
    answered.one("store", "fault", "others may read the key", cure=f"chmod 600 {key}")
    assert users["ann"].key_text not in str(answered)
    log_in(Credentials("root", users["ann"].seed), monkeypatch)
    doctor(url).one("store", "fault", cure="key")
