"""The attributes of a volume, and the arguments that `dlcmd mount` gets for it."""

from dataclasses import replace

import click
import pytest

from diesel_fs.errors import UsageError
from diesel_kubernetes.csi.volumes import Volume, VolumeLimits, check_mount_flags, parse_volume
from diesel_kubernetes.names import ATTRIBUTES, POD_NAME, POD_NAMESPACE, SECRETS
from dlcmd.verbs.mount import mount
from tests.rows import each_row

LIMITS = VolumeLimits(
    url="diesel://default:9300",
    file_roots=("/data",),
    cache_root="/fast",
    memory_bytes_max=1 << 30,
    cache_bytes_max=10 << 30,
)
NODE_KEY = b"k" * 32


def parsed(
    attributes: dict[str, str], secrets: dict[str, str] | None = None, limits: VolumeLimits = LIMITS
) -> Volume:
    return parse_volume({"dataset": "pets", **attributes}, secrets or {}, limits)


ALL = {
    "version": "1790000000000000",
    "url": "s3://bucket/prefix?meta=rediss://redis:6379/0",
    "user": "trainer",
    "region": "eu-west-1",
    "endpoint": "https://store.example:9000",
    "session": "kernel",
    "memory": "512M",
    "policy": "oneshot",
    "evict": "lrfu",
    "seed": "7",
    "groupSize": "50",
    "uid": "1000",
    "gid": "100",
    "umask": "027",
    "cacheDir": "pets",
    "cacheSize": "1G",
    "cacheLayout": "auto",
    "orderLogBelow": "16K",
    "coolDown": "90m",
    "lrfuP": "1.5",
    "lrfuStep": "0.25",
    "task": "night-run",
    "rank": "pod+1",
    "world": "8",
    "peerTls": "true",
    "peersThroughMaster": "true",
    POD_NAMESPACE: "team",
    POD_NAME: "train-worker-3",
}


def test_every_attribute_becomes_an_option_that_dlcmd_knows() -> None:
    """All attributes in one volume, but `follow`, which excludes `version`."""
    assert {*ALL, "dataset", "follow"} - {POD_NAMESPACE, POD_NAME} == set(ATTRIBUTES)
    volume = parsed(ALL)
    assert volume.named == "pets@1790000000000000"
    assert volume.environment == {
        "DIESEL_URL": "s3://bucket/prefix?meta=rediss://redis:6379/0",
        "DIESEL_USER": "trainer",
        "AWS_REGION": "eu-west-1",
        "AWS_ENDPOINT_URL": "https://store.example:9000",
    }
    assert set(volume.options) == {
        "--session=kernel", "--memory=536870912", "--policy=oneshot", "--evict=lrfu", "--seed=7",
        "--group-size=50", "--uid=1000", "--gid=100", "--umask=027", "--cache-dir=/fast/team/pets",
        "--cache-size=1073741824", "--cache-layout=auto", "--cool-down=90m", "--lrfu-p=1.5",
        "--order-log-below=16384",
        "--lrfu-step=0.25", "--task=night-run", "--rank=4", "--world=8",
        "--peer-tls", "--peers-through-master",
    }  # fmt: skip
    followed = parsed({"follow": "true"})
    assert {"--follow", "--session=kernel"} < set(followed.options)
    known = {name for each in mount.params if isinstance(each, click.Option) for name in each.opts}
    for option in (*volume.options, *followed.options):
        assert option.partition("=")[0] in known


def test_defaults() -> None:
    volume = parsed({})
    assert volume.options == ("--session=auto", "--memory=1073741824")
    assert volume.environment == {"DIESEL_URL": LIMITS.url}
    assert volume.may_go_stale
    assert "--cache-size=10737418240" in parsed({"cacheDir": "c"}).options


@each_row(
    ("attributes", "message"),
    [
        ({"dataset": ""}, "dataset name"),
        ({"dataset": "-f"}, "dataset name"),
        ({"dataset": "a/../b"}, "dataset name"),
        ({"dataset": "pets@1"}, "dataset name"),
        ({"version": "latest"}, "version"),
        ({"version": "1", "follow": "true"}, "exclude"),
        ({"follow": "yes"}, "follow"),
        ({"follow": "true", "session": "native"}, "exclude"),
        ({"session": "--force"}, "session"),
        ({"policy": "all"}, "policy"),
        ({"seed": "1 --log-file=/etc/passwd"}, "seed"),
        ({"seed": "-1"}, "seed"),
        ({"seed": "\u0661"}, "seed"),
        ({"umask": "99"}, "umask"),
        ({"uid": "root"}, "uid"),
        ({"memory": "2G"}, "memory"),
        ({"memory": "0"}, "memory"),
        ({"memory": "much"}, "memory"),
        ({"cacheDir": "../other"}, "cacheDir"),
        ({"cacheDir": "/etc"}, "cacheDir"),
        ({"cacheSize": "1G"}, "needs cacheDir"),
        ({"cacheDir": "c", "cacheSize": "11G"}, "cacheSize"),
        ({"orderLogBelow": "16K"}, "needs cacheDir"),
        ({"cacheDir": "c", "orderLogBelow": "16K", "cacheLayout": "order"}, "needs cacheLayout"),
        ({"cacheDir": "c", "orderLogBelow": "small"}, "orderLogBelow"),
        ({"coolDown": "1h"}, "needs cacheDir"),
        ({"cacheDir": "c", "coolDown": "3600"}, "coolDown"),
        ({"cacheDir": "c", "lrfuP": "3"}, "needs evict: lrfu"),
        ({"cacheDir": "c", "evict": "lrfu", "lrfuP": "0.5"}, "lrfuP is a number from 1 on"),
        ({"cacheDir": "c", "evict": "lrfu", "lrfuStep": "1.5"}, "lrfuStep is a number from 0 to 1"),
        ({"cacheDir": "c", "evict": "lrfu", "lrfuStep": "1/24"}, "lrfuStep"),
        ({"rank": "1"}, "needs task"),
        ({"task": "t", "rank": "pod"}, "number in the pod's name"),
        ({"task": "t", "rank": "first"}, "rank"),
        ({"task": "../t"}, "task"),
        ({"url": "file:///etc"}, "/etc"),
        ({"url": "file:///data/../etc"}, "may not name"),
        ({"url": "file:///data/%2e%2e/etc"}, "may not name"),
        ({"url": "diesel://user:word@host:1"}, "password"),
        ({"url": "s3://bucket?meta=redis://:word@host"}, "password"),
        ({"url": "s3://bucket?meta=unix:///run/redis.sock"}, "node"),
        ({"url": "s3://bucket?meta=rediss://host:1?ca=/etc/shadow"}, "node"),
        ({"url": "ftp://host"}, "scheme"),
        ({"endpoint": "http://user:word@host"}, "endpoint"),
        ({"endpoint": "file:///etc"}, "endpoint"),
        ({"user": "a b"}, "user"),
        ({"snapshot": "/etc/passwd"}, "unknown volume attribute 'snapshot'"),
        ({"allowOther": "true"}, "unknown volume attribute 'allowOther'"),
        ({"csi.storage.k8s": "x"}, "unknown volume attribute"),
    ],
)
def test_refused_attributes_are_named(attributes: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        parsed(attributes)
    assert "word" not in str(error.value).replace("password", "")


def test_without_roots_no_folder_of_the_node_is_reached() -> None:
    bare = VolumeLimits(url="file:///admins/own")
    assert parsed({}, limits=bare).file_folder == "/admins/own"
    with pytest.raises(UsageError, match="--file-root"):
        parsed({"url": "file:///data"}, limits=bare)
    with pytest.raises(UsageError, match="--cache-root"):
        parsed({"cacheDir": "c"}, limits=bare)
    with pytest.raises(UsageError, match="evict: lrfu"):
        parsed({"evict": "lrfu"}, limits=bare)
    with pytest.raises(UsageError, match="no repository"):
        parsed({}, limits=replace(bare, url=""))


@each_row(
    ("pod", "rank", "number"),
    [
        ("train-worker-3", "pod", "3"),
        ("train-worker-3", "pod+1", "4"),
        ("train-11", "pod", "11"),
        ("train-11-x7k2p", "pod", "11"),
        ("train-0", "pod", "0"),
        ("anything", "5", "5"),
    ],
)
def test_a_rank_comes_from_the_pods_name(pod: str, rank: str, number: str) -> None:
    volume = parsed({"task": "t", "rank": rank, POD_NAME: pod})
    assert f"--rank={number}" in volume.options


def test_equal_volumes_have_one_key_and_others_do_not() -> None:
    here, secrets = {POD_NAMESPACE: "team"}, {"user": "u", "key": "k"}
    first = parsed({**here, POD_NAME: "a"}, secrets)
    key = first.key(NODE_KEY)
    assert parsed({**here, POD_NAME: "b"}, {"key": "k", "user": "u"}).key(NODE_KEY) == key
    others = [
        parsed(here),
        parsed(here, {"user": "u", "key": "other"}),
        parsed({**here, "seed": "1"}, secrets),
        parsed({**here, "url": "diesel://other:1"}, secrets),
        parsed({**here, "dataset": "other"}, secrets),
        parsed({**here, "version": "1"}, secrets),
        parsed({POD_NAMESPACE: "others"}, secrets),
    ]
    keys = {each.key(NODE_KEY) for each in others}
    assert len(keys) == len(others)
    assert key not in keys
    assert first.key(b"another node") != key


def test_secrets_are_variables_and_in_no_text() -> None:
    secrets = {name: f"secret-{name}" for name in SECRETS}
    volume = parsed({}, {**secrets, "user": "ann", "key": " padded \n"})
    assert volume.secrets["DIESEL_KEY"] == "padded"
    assert volume.secrets["AWS_ACCESS_KEY_ID"] == "secret-AWS_ACCESS_KEY_ID"
    assert "secret-" not in repr(volume)
    assert volume.without_secrets("a secret-taskKey b") == "a *** b"
    with pytest.raises(UsageError, match="'password'") as error:
        parsed({}, {"password": "canary"})
    assert "canary" not in str(error.value)


def test_mount_options() -> None:
    check_mount_flags(["ro", "noatime"])
    with pytest.raises(UsageError, match="'exec'"):
        check_mount_flags(["ro", "exec"])
