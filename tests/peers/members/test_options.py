"""The keyword arguments of a Python call about a task: every bad one is an error that names it."""

import math
import os
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Protocol, cast, get_args

import numpy as np
import pytest

import diesel_fs
from diesel_fs.cache.disk.rule import EvictionRule
from diesel_fs.cache.policies.eviction import POLICIES
from diesel_fs.errors import ConfigError, UsageError
from diesel_fs.mounts import launcher
from diesel_fs.mounts.options import MountRequest
from diesel_fs.peers.members.options import (
    NO_TASK,
    Eviction,
    TaskKwargs,
    TaskOptions,
    chunk_policy,
    option_specs,
)
from tests.rows import each_row

SECRET = "canary-71aa-and-long-enough"  # noqa: S105  # of these tests alone


class Call(Protocol):
    def __call__(self, **words: object) -> object: ...


def of(**words: object) -> TaskOptions:
    return TaskOptions.from_kwargs(cast(TaskKwargs, words), "here")


@pytest.fixture
def calls(tmp_path: Path) -> dict[str, Call]:
    url = (tmp_path / "store").as_uri()
    diesel_fs.connect("ds", url, create=True).close()
    return {
        "connect": partial(diesel_fs.connect, "ds", url),
        "mount": partial(diesel_fs.mount, "ds", tmp_path / "mount", url=url),
    }


UNKNOWN = [
    ({"tassk": "night"}, "unknown word 'tassk'; is task meant"),
    ({"cachedir": "/ssd"}, "is cache_dir meant"),
    ({"ranks": 3}, "is rank meant"),
    ({"quite_another": 3}, "cache_bytes, cache_dir"),
    ({"task": "a", "tassk": None}, "'tassk'"),
]
BAD = [
    ({"policy": "bogus"}, "bad policy 'bogus'; one of on-demand, oneshot"),
    ({"evict": "fifo"}, "bad evict 'fifo'; one of plan, importance, lrfu, lru, lfu, none"),
    ({"policy": ["oneshot"]}, "bad policy"),
    ({"rank": "0x1", "world": "4"}, "rank is a number, not '0x1'"),
    ({"world": ""}, "world is a number"),
    ({"rank": True}, "rank is a whole number, not of type bool"),
    ({"rank": 1.0}, "rank is a whole number"),
    ({"rank": np.zeros(2)}, "rank is a whole number, not of type ndarray"),
    ({"rank": -1, "world": 2}, "rank is a number from 0 on"),
    ({"peers": 5}, "peers is a list of HOST:PORT"),
    ({"peers": ["h:1", b"h:2"]}, "peers is a list of HOST:PORT, not of type bytes"),
    ({"peers": b"h:1,h:2"}, "peers is a list"),
    ({"peers": "h:1,h:2", "world": 3}, "peers names 2 nodes, and world says 3"),
    ({"listen": 5}, "listen is text"),
    ({"advertise": b"h"}, "advertise is text"),
    ({"cache_dir": "/ssd", "cache_bytes": "5G"}, "cache_bytes is a whole number, not of type str"),
    ({"cache_dir": "/ssd", "cache_bytes": -1}, "cache_bytes is a number from 0 on, not -1"),
    ({"cache_dir": b"/ssd"}, "cache_dir is a path"),
    ({"cache_bytes": 5}, "say cache_dir"),
    ({"evict": "lrfu"}, "evict lrfu chooses what stays in a cache folder, and none is named"),
    ({"cache_dir": "/ssd", "cool_down_s": 1.5}, "cool_down_s is a whole number"),
    ({"cache_dir": "/ssd", "cool_down_s": -1}, "cool_down_s is a number from 0 on, not -1"),
    ({"cool_down_s": 5}, "cool_down_s is about a cache folder, and none is named; say cache_dir"),
    ({"evict": "lrfu", "cache_dir": "/ssd", "lrfu_p": 0.99}, "lrfu_p is a number from 1 on, not 0"),
    ({"evict": "lrfu", "cache_dir": "/ssd", "lrfu_p": "2"}, "lrfu_p is a number, not of type str"),
    ({"evict": "lrfu", "cache_dir": "/ssd", "lrfu_p": math.inf}, "lrfu_p is a number from 1 on"),
    ({"evict": "lrfu", "cache_dir": "/ssd", "lrfu_p": 10**400}, "lrfu_p is a number"),
    ({"evict": "lrfu", "cache_dir": "/ssd", "lrfu_step": 1.5}, "lrfu_step is a number from 0 to 1"),
    ({"evict": "lrfu", "cache_dir": "/ssd", "lrfu_step": math.nan}, "lrfu_step is a number from 0"),
    ({"cache_dir": "/ssd", "lrfu_step": 0}, "lrfu_step is about evict lrfu; say evict lrfu"),
    ({"task_key": SECRET.encode()}, "task_key is text, not of type bytes"),
    ({"task_key": "  \n"}, "key is empty"),
    ({"task": 5}, "task is text, not of type int"),
    ({"peer_tls": "no"}, "peer_tls is True or False"),
]
WITHOUT_A_TASK = ["rank", "world", "peers", "listen", "advertise", "task_key", "peer_tls"]


@each_row("call", ["connect", "mount"])
@each_row(("words", "reason"), UNKNOWN + BAD)
def test_unknown_and_bad_arguments_are_named(
    calls: dict[str, Call], call: str, words: dict[str, object], reason: str
) -> None:
    with pytest.raises(UsageError) as refused:
        calls[call](**{"task": "night", **words})
    assert reason in str(refused.value)
    assert SECRET not in str(refused.value)


def test_memory_sizes_must_be_numbers(calls: dict[str, Call]) -> None:
    for word in ("memory_bytes", "task_memory_bytes"):
        for bad in ("1G", -5, 1.5, True):
            with pytest.raises(UsageError, match=f"{word} is a"):
                calls["connect"](task="night", **{word: bad})
    with pytest.raises(UsageError, match="memory_bytes is a whole number"):
        calls["mount"](memory_bytes="1G")


@each_row("call", ["connect", "mount"])
@each_row("word", WITHOUT_A_TASK)
def test_arguments_about_a_task_need_one(calls: dict[str, Call], call: str, word: str) -> None:
    numbers = {"rank": 0, "world": 2, "peers": "a:1", "peer_tls": True}
    with pytest.raises(UsageError, match=f"^{word} is about a task; say which, by task$"):
        calls[call](**{word: numbers.get(word, SECRET)})


def test_without_a_task_memory_share_and_policy_are_refused(calls: dict[str, Call]) -> None:
    for word, value in {"task_memory_bytes": 1 << 20, "policy": "on-demand"}.items():
        with pytest.raises(UsageError, match=f"{word} is about a task"):
            calls["connect"](**{word: value})
    assert of(policy="oneshot").policy == "oneshot"  # an option of mounts


def test_lrfu_needs_a_cache_folder_and_no_task() -> None:
    for words in ({}, {"cache_layout": "order"}):
        found = of(evict="lrfu", cache_dir="/ssd", **words)
        assert (found.evict, chunk_policy(found.evict)) == ("lrfu", "plan")
        with pytest.raises(UsageError, match="say cache_dir"):
            of(evict="lrfu")


def test_a_job_names_by_what_it_evicts_in_its_cache_folder() -> None:
    for words in ({}, {"cache_layout": "order"}):
        found = of(
            cache_dir="/ssd",
            evict="lrfu",
            cool_down_s=0,
            lrfu_p=np.float32(4),
            lrfu_step=0,
            **words,
        )
        read = TaskOptions.from_json(found.to_json())
        assert read.eviction_rule == EvictionRule(0, by_references=True, lrfu_p=4, lrfu_step=0)
        usual = of(cache_dir="/ssd", cool_down_s=3600, **words).eviction_rule
        assert usual == EvictionRule(3600)
    assert of(cache_dir="/ssd").eviction_rule == EvictionRule()


def test_None_means_not_given(calls: dict[str, Call]) -> None:
    nothing = dict.fromkeys(TaskKwargs.__optional_keys__)
    assert of(**nothing) == of() == NO_TASK
    opened = calls["connect"](**nothing, task_memory_bytes=None)
    assert isinstance(opened, diesel_fs.Dataset)
    assert not opened.task_options
    opened.close()


def test_a_mount_uses_the_datasets_task_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[MountRequest] = []
    monkeypatch.setattr(launcher, "mount", requests.append)
    with diesel_fs.connect("ds", (tmp_path / "store").as_uri(), create=True) as dataset:
        task = TaskOptions(task="night", policy="oneshot")
        dataset._options = replace(dataset._options, task=task)
        for words in ({}, {"task": None, "rank": None}, {"policy": "on-demand"}):
            diesel_fs.mount(dataset, tmp_path / "mount", **words)
    assert [each.task_options.task for each in requests] == ["night", "night", ""]
    assert [each.policy for each in requests] == ["oneshot", "oneshot", "on-demand"]


def test_arguments_may_be_text_from_the_environment() -> None:
    found = of(task="t", rank="1", world=" 3 ", peers="h:1, h:2,h:3", cache_dir=Path("x"))
    assert (found.rank, found.world, found.peers) == (1, 3, ("h:1", "h:2", "h:3"))
    assert found.cache_dir == os.path.abspath("x")
    of(task="t", rank=np.int64(1), world=np.int32(3), peers=("h:1", "h:2", "h:3")).to_json()
    assert of(task="t", peers=["h:1"]).peers == ("h:1",)


def test_a_blank_key_in_the_environment_fails_only_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIESEL_TASK_KEY", "  ")
    assert not of()  # the key concerns no task
    with pytest.raises(ConfigError, match="key is empty"):
        of(task="t")
    monkeypatch.setenv("DIESEL_TASK_KEY", "")
    assert of(task="t").task_key == ""
    monkeypatch.setenv("DIESEL_TASK_KEY", SECRET)
    assert of(task="t").task_key == SECRET
    assert of(task="t", task_key="").task_key == ""


def test_the_eviction_choices_are_the_policies() -> None:
    assert {*map(chunk_policy, get_args(Eviction))} == {*POLICIES}


def test_the_keyword_arguments_are_the_fields_of_the_options() -> None:
    names = {each.name for each in fields(TaskOptions)}
    assert TaskKwargs.__optional_keys__ == names == {*option_specs()}
