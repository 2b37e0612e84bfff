"""Recommends one of several forecasts, and writes a forecast's shell commands and JSON. Pure."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from .kept import ORDER_LOG, TIERS
from .simulate import EpochForecast, Forecast

ALIKE = 0.02
"""Times within this fraction of the shortest count as equal; then the price decides."""

UNITS = {"chunks": "whole chunks", "files": "files", "log": "files, in the next order"}


@dataclass(frozen=True, slots=True)
class ForecastOptions:
    """Sizes are as the user typed them. `is_given_order`: the user named a file with the order."""

    dataset: str
    memory: str
    cache_size: str
    is_given_order: bool = False
    fits_alone: bool = False
    """Whether one machine alone has memory for the whole dataset."""


def recommended(forecasts: Sequence[Forecast]) -> Forecast:
    """The forecast with the shortest time; among equal times (`ALIKE`) the lowest price, then the
    fewest bytes written to SSDs. `forecasts` must not be empty."""
    best_s = min(each.seconds for each in forecasts)
    alike = [each for each in forecasts if each.seconds <= best_s * (1 + ALIKE)]
    return min(
        alike, key=lambda each: (each.price, sum(epoch.written_bytes for epoch in each.epochs))
    )


def needs_no_cache(forecast: Forecast, options: ForecastOptions) -> bool:
    """Whether a mount without a shared cache suffices: one machine has memory for the whole
    dataset, and the user names no SSD that would keep the data for later jobs."""
    job = forecast.job
    return options.fits_alone and job.nodes == 1 and not job.node.disk_bytes


def commands(forecast: Forecast, options: ForecastOptions) -> list[str]:
    """One command mounts the dataset on a node, the other runs the training."""
    job = forecast.job
    is_plain = needs_no_cache(forecast, options)
    mount = ["dlcmd", "mount", options.dataset, f"/mnt/{options.dataset}"]
    mount += ["--memory", options.memory]
    if is_plain:
        pass
    elif forecast.policy == ORDER_LOG:
        mount += ["--cache-layout", "order"]
    else:
        mount += ["--evict", forecast.policy]
    if job.node.disk_bytes:
        mount += ["--cache-dir", "/var/cache/diesel", "--cache-size", options.cache_size]
    text = shlex.join(mount)
    if job.nodes > 1:
        text += f' --task "$JOB" --rank "$NODE" --world {job.nodes}'
    elif not is_plain and forecast.policy != ORDER_LOG and not job.node.disk_bytes:
        text += ' --task "$JOB" --rank 0 --world 1'
    train = ["dlcmd", "run", "--ahead", "1"]
    if options.is_given_order:
        train = ["dlcmd", "run"]
    elif job.shuffle == "chunk":
        train += ["--shuffle", "chunk", "--group-size", str(job.group_size)]
    else:
        train += ["--shuffle", "full"]
    return [text, f"{shlex.join(train)} -- python train.py"]


def described(forecast: Forecast) -> dict[str, object]:
    """README.md lists the keys of this JSON."""
    return {
        "policy": forecast.policy,
        "shuffle": forecast.job.shuffle,
        "layout": forecast.layout,
        "node": asdict(forecast.job.node),
        "seconds": forecast.seconds,
        "price": forecast.price,
        "epochs": [_described_epoch(each, forecast) for each in forecast.epochs],
    }


def _described_epoch(epoch: EpochForecast, forecast: Forecast) -> dict[str, object]:
    price = forecast.job.store.price(epoch.store_requests, epoch.store_bytes)
    return {
        **asdict(epoch),
        "files": dict(zip(TIERS, epoch.files, strict=True)),
        "bytes": dict(zip(TIERS, epoch.bytes, strict=True)),
        "kept": epoch.kept,
        "price": price,
    }
