"""The table of benchmarks: `cases/` has them, and `experiments/` those that repeat papers.

Each is a function that takes the workbench, returns rows, and cleans up.
"""

from collections.abc import Callable, Mapping

from .cases import (
    csi,
    kernel,
    listing,
    mount,
    native,
    put,
    read,
    server,
    shared,
    snapshot,
    task_connections,
    task_mounts,
    task_plan,
    task_reads,
    tasks,
    training_overhead,
    window,
)
from .experiments import (
    accuracy,
    importance,
    lobster,
    lrfu,
    order_logs,
    plan_real,
    rank_balance,
    task_clients,
    task_deaths,
    training,
    training_api,
)
from .inputs import D4L, D110
from .report import Row
from .workbench import Workbench

Benchmark = Callable[[Workbench], list[Row]]

BENCHMARKS: Mapping[str, Benchmark] = {
    "put-D4L": put.rate_of(D4L),
    "put-D110": put.rate_of(D110),
    "put-tar": put.from_tar,
    "put-unpack": put.unpack,
    "put-memory": put.peak_memory,
    "put-memory-many": put.peak_memory_of_many,
    "snapshot": snapshot.measure,
    "read-many": read.many,
    "mount-start": mount.ready,
    "mount-read": mount.read,
    "kernel-epochs": kernel.second_epoch,
    "kernel-first": kernel.first_epoch,
    "kernel-window": window.chunk_wise,
    "kernel-unplanned": window.unplanned,
    "kernel-read": kernel.one_read_a_file,
    "kernel-readers": kernel.many_readers,
    "kernel-ls": listing.measure,
    "native-second": native.second_epoch,
    "native-first": native.first_epoch,
    "native-window": window.native,
    "native-larger": native.larger_files,
    "native-file": native.one_large_file,
    "native-ls": listing.native,
    "native-start": mount.first_byte,
    "native-memory": mount.memory,
    "redis-put": shared.put,
    "redis-recover": shared.recover,
    "server-put": server.put,
    "server-stat": server.stat,
    "server-snapshot": server.snapshot,
    "server-read": server.read,
    "tasks-reads": task_reads.reads,
    "tasks-local": task_reads.local,
    "tasks-mount": task_mounts.small_files,
    "tasks-large": task_mounts.large_files,
    "tasks-clients": task_clients.measure,
    "tasks-connections": task_connections.measure,
    "tasks-deaths": task_deaths.measure,
    "tasks-egress": tasks.egress,
    "tasks-cold": tasks.cold,
    "tasks-recovery": tasks.recovery,
    "tasks-policies": tasks.policies,
    "tasks-too-large": tasks.too_large,
    "order-logs": order_logs.unlimited,
    "order-limited": order_logs.limited,
    "order-mount": order_logs.through_mount,
    "order-index": order_logs.index,
    "task-plan": task_plan.measure,
    "accuracy": accuracy.measure,
    "importance-accuracy": importance.accuracy,
    "importance-less": importance.accuracy_of_less,
    "importance-hits": importance.hits,
    "importance-jobs": importance.jobs,
    "importance-epochs": importance.epochs,
    "importance-overhead": importance.overhead,
    "training-waits": training.waits,
    "training-memory": training.little_memory,
    "training-rates": training.rates,
    "training-decoding": training.decoding,
    "training-api": training_api.measure,
    "training-overhead": training_overhead.measure,
    "plan-speed": lobster.speed,
    "plan-real": plan_real.measure,
    "lobster-hits": lobster.hit_ratios,
    "lobster-imbalance": lobster.imbalance,
    "lrfu": lrfu.simulate,
    "rank-balance": rank_balance.measure,
    "csi-publish": csi.publish,
    "csi-many": csi.many,
}

UNTIMED = frozenset(
    "accuracy importance-accuracy importance-less importance-hits lobster-hits lobster-imbalance"
    " lrfu".split()
)
"""Benchmarks that measure no time, and have a number of repetitions of their own: their figures are
the same on a busy machine, and with `--quick`."""


def chosen(names: list[str]) -> dict[str, Benchmark]:
    """The benchmarks whose names begin with one of `names`; all of them if `names` is empty.

    Raises KeyError for a name that chooses nothing.
    """
    for name in names:
        if not any(each.startswith(name) for each in BENCHMARKS):
            raise KeyError(name)
    return {
        name: run
        for name, run in BENCHMARKS.items()
        if not names or any(name.startswith(each) for each in names)
    }
