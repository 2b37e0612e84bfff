"""The table of benchmarks. Their functions are in `cases/`; in `experiments/` if they repeat
papers.

Each is a function that takes the workbench, returns rows, and cleans up.
"""

from collections.abc import Callable, Mapping

from .cases import (
    limits,
    mounts,
    put,
    server,
    task_connections,
    task_mounts,
    tasks,
    versions,
    window,
)
from .experiments import (
    access,
    accuracy,
    importance,
    lobster,
    lobster_ranks,
    lrfu,
    order_logs,
    plan_costs,
    plan_real,
    rank_balance,
    ssd_cache,
    task_clients,
    task_deaths,
    training,
)
from .inputs import D4L, D110
from .report import Row
from .workbench import Workbench

Benchmark = Callable[[Workbench], list[Row]]

BENCHMARKS: Mapping[str, Benchmark] = {
    "put-D4L": put.rate_of(D4L, 0.9),
    "put-D110": put.rate_of(D110, 0.8),
    "put-tar": put.from_tar,
    "put-unpack": put.unpack,
    "put-memory": put.peak_memory,
    "snapshot": limits.snapshot,
    "read-many": limits.read_many,
    "versions-put-1M": versions.put_one(versions.E1M),
    "versions-put-4M": versions.put_one(versions.E4M),
    "versions-put-20M": versions.put_one(versions.E20M),
    "versions-mount-4M": versions.mounted(versions.E4M),
    "versions-mount-20M": versions.mounted(versions.E20M),
    "mount-start": mounts.ready,
    "kernel-epochs": mounts.kernel_epochs,
    "kernel-first": mounts.kernel_first,
    "kernel-window": window.chunk_wise,
    "kernel-unplanned": window.unplanned,
    "kernel-read": mounts.kernel_reads,
    "kernel-readers": mounts.kernel_readers,
    "kernel-ls": mounts.kernel_ls,
    "native-second": mounts.native_second,
    "native-first": mounts.native_first,
    "native-window": window.native,
    "native-larger": mounts.native_larger,
    "native-file": mounts.native_file,
    "native-ls": mounts.native_ls,
    "native-start": mounts.native_start,
    "redis-put": put.with_redis,
    "redis-recover": put.recover,
    "server-put": server.put,
    "server-stat": server.stat,
    "server-snapshot": server.snapshot,
    "server-read": server.read,
    "tasks-reads": tasks.reads,
    "tasks-local": tasks.local,
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
    "access-time": access.time_of_epochs,
    "access-sessions": access.sessions,
    "order-logs": order_logs.unlimited,
    "order-limited": order_logs.limited,
    "order-throughput": ssd_cache.throughput,
    "order-index": ssd_cache.index,
    "order-recovery": ssd_cache.recovery,
    "task-plan": tasks.planned,
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
    "training-steps": training.steps,
    "training-tuning": training.tuning,
    "training-decoding": training.decoding,
    "training-api": training.api,
    "training-overhead": limits.run_overhead,
    "plan-speed": lobster.speed,
    "plan-real": plan_real.measure,
    "plan-bytes": plan_costs.store_bytes,
    "plan-overhead": plan_costs.overhead,
    "lobster-hits": lobster.hit_ratios,
    "lobster-imbalance": lobster.imbalance,
    "lrfu": lrfu.simulate,
    "lobster-ranks": lobster_ranks.measure,
    "rank-balance": rank_balance.measure,
    "csi-publish": limits.csi_publish,
    "csi-many": limits.csi_many,
}

UNTIMED = frozenset(
    "accuracy importance-accuracy importance-less importance-hits lobster-hits lobster-imbalance"
    " lrfu".split()
)
"""Benchmarks that measure no time, and set their own number of repetitions: their figures are the
same on a busy machine, and with `--quick`."""


def chosen(names: list[str]) -> dict[str, Benchmark]:
    """The benchmarks with names that begin with one of `names`; all of them if `names` is empty.
    Raises KeyError for an element that chooses nothing."""
    for name in names:
        if not any(each.startswith(name) for each in BENCHMARKS):
            raise KeyError(name)
    begun = tuple(names or [""])
    return {name: run for name, run in BENCHMARKS.items() if name.startswith(begun)}
