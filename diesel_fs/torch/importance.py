"""`ImportanceSampler`: trains on important samples more often, and on the others less often.

Experimental: with half of the samples per epoch, our study found no gain in accuracy over as many
random samples (README.md has the figures), so arguments and states may still change.

The sampler implements the I/O-oriented importance sampling of iCache (HPCA 2023, section III-A),
with the rule of Selective-Backprop; `orders/importance.py` explains and computes the rule and the
draw. An epoch's samples are drawn when it begins, from the values that the loop has reported with
`update` in earlier epochs. The mount gets the draw, like any other order, and the probability of
each sample as its importance, so that it can keep the important ones in memory (`--evict
importance`).

**One table for all ranks.** A rank keeps its reports until the next epoch begins; then the ranks
exchange them (`torch.distributed`), so all ranks draw from the same table. The table does not
change during an epoch, so a run that resumes in the middle of it can repeat its draw. Not safe for
concurrent use.
"""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed
from torch import Tensor
from torch.nn.functional import one_hot
from torch.utils.data import DataLoader
from xxhash import xxh3_64_intdigest

from ..errors import ConflictError, DieselError, UsageError
from ..format.snapshot.reader import Indices
from ..mounts.plans.control import Control, explicit
from ..orders.importance import (
    SHARE_DEFAULT,
    DrawRule,
    Values,
    at_home,
    home_nodes,
    is_low,
    substituted,
    weights,
)
from ..orders.parts import Partition, part_length
from ..orders.shuffle import GROUP_SIZE_DEFAULT, WORLD_MAX, check_number, group_ends
from .hook.diesel_hook import has_joined
from .sampler import ChunkShuffleSampler, EpochPlace, _Iteration

WARM_UP_DEFAULT = 1
"""Epochs of all samples before the first draw, as in the scripts of Selective-Backprop."""

BENEFIT_BATCHES = 20
"""The batches that are timed with samples outside the mount's memory, and again as many with
samples in it (iCache, section III-D)."""

_LOCAL_WORLDS = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE")
_JOB_NAMES = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
_JOB_NAME_MAX, _BENEFIT_MAX = 64, 1e3  # the limits of a mount

_PENDING_MAX = 1 << 16
"""This number of reported values is copied from the device at once: each copy waits for it."""

_Batch = TypeVar("_Batch", covariant=True)
Numbers: TypeAlias = "Tensor | npt.NDArray[np.int64] | Sequence[int]"
"""Indices of samples in the dataset."""

Losses: TypeAlias = "Tensor | npt.NDArray[np.float32 | np.float64] | Sequence[float]"

_DIFFERENCES = (
    "is in another epoch than rank 0",
    "reads another dataset, version or selection of files than rank 0",
    "has other arguments than rank 0",
)
"""The error for each of a rank's *claims*: numbers that must be equal on all ranks (`_claims`)."""


class Importance(ABC):
    """Computes from a training step how important each sample of its batch is. A subclass needs
    only `measure`."""

    @abstractmethod
    def measure(self, losses: Tensor, outputs: Tensor | None, targets: Tensor | None) -> Tensor:
        """Return one number for each sample, on any device; only their order counts, greater is
        more important.

        `losses` has the shape (batch,); `outputs` and `targets` are those passed to `update`, batch
        first. The tensors have no gradients. If a number is negative, infinite or NaN, the sample
        keeps its previous value. Raises UsageError if an argument is missing.
        """


class Loss(Importance):
    """The loss of a sample, as in iCache and Selective-Backprop."""

    def measure(self, losses: Tensor, outputs: Tensor | None, targets: Tensor | None) -> Tensor:
        return losses


class GradientNorm(Importance):
    """The norm of the gradient of a sample's cross entropy with respect to the network's outputs.

    It bounds the gradient of all weights, up to a factor that all samples share (Katharopoulos and
    Fleuret, "Not All Samples Are Created Equal", ICML 2018, section 3.2). `outputs` has the shape
    (batch, classes), before the softmax; `targets` has classes, of the shape (batch,), or their
    probabilities, shaped as `outputs`.
    """

    def measure(self, losses: Tensor, outputs: Tensor | None, targets: Tensor | None) -> Tensor:
        if outputs is None or targets is None or outputs.ndim != 2:
            raise UsageError(
                "the gradient norm needs outputs of the shape (batch, classes), and targets",
                advice="call update(indices, losses, outputs, targets)",
            )
        if targets.ndim == 1:
            targets = one_hot(targets, outputs.shape[1])
        return torch.linalg.vector_norm(outputs.float().softmax(1) - targets.float(), dim=1)


class _Table:
    """The importance of each sample (NaN: not known) that the ranks have agreed on, and this rank's
    reports since then."""

    def __init__(self, samples: int, importance: Importance) -> None:
        self.agreed: Values = np.full(samples, np.nan, np.float32)
        self.agreed_for = -1
        """The epoch that is drawn from `agreed`; -1: none yet."""
        self.nodes = 1
        """The number of nodes; 1 if their numbers of ranks differ."""
        self.reported: Values = np.full(samples, np.nan, np.float32)
        self.ignored = 0
        self._importance = importance
        self._indices: list[Tensor | npt.NDArray[np.int64]] = []
        self._values: list[Tensor] = []
        self._pending = 0

    def report(
        self,
        indices: Numbers,
        losses: Losses,
        outputs: Tensor | None,
        targets: Tensor | None,
    ) -> None:
        """Raises UsageError if shapes do not fit."""
        samples = _copied_row(indices)
        losses = losses if isinstance(losses, Tensor) else torch.as_tensor(losses)
        if losses.ndim != 1 or len(losses) != len(samples):
            raise UsageError(
                f"losses have the shape {tuple(losses.shape)}, for {len(samples)} samples",
                advice='give one loss for each sample: the criterion takes reduction="none"',
            )
        values = self._importance.measure(losses.detach(), _detached(outputs), _detached(targets))
        if values.shape != losses.shape:
            raise UsageError(
                f"{type(self._importance).__name__} gives the shape {tuple(values.shape)}"
                f" for {len(samples)} samples"
            )
        if self._values and self._values[0].device != values.device:
            self.settle_pending()
        # A copy, since the loop may change the losses in place. (A conversion makes one.)
        is_float = values.dtype == torch.float32
        self._values.append(values.clone() if is_float else values.to(torch.float32))
        self._indices.append(samples)
        self._pending += len(samples)
        if self._pending >= _PENDING_MAX:
            self.settle_pending()

    @property
    def has_reports(self) -> bool:
        return self._pending > 0 or not np.isnan(self.reported).all()

    def forget_pending(self) -> None:
        self._indices, self._values, self._pending = [], [], 0

    def settle_pending(self) -> None:
        """Copy the pending values from their device into `reported`. If some are of samples that do
        not exist, raises UsageError after the others are recorded."""
        if not self._pending:
            return
        given, values = self._indices, torch.cat(self._values).cpu().numpy()
        self.forget_pending()
        indices = np.concatenate([_as_row(each) for each in given])
        is_good = np.isfinite(values) & (values >= 0)
        self.ignored += int(len(values) - np.count_nonzero(is_good))
        is_good &= (indices >= 0) & (indices < len(self.agreed))
        self.reported[indices[is_good]] = values[is_good]
        _check_samples("update", indices, len(self.agreed))

    def agree(self, epoch: int, world: int, claims: Sequence[int], *, has_ranks: bool) -> None:
        """Update `agreed` by the reports of all ranks, and clear this rank's reports. All ranks
        call it together; without `has_ranks`, only this rank's reports count.

        Raises ConflictError on all ranks if their `claims` differ (`_DIFFERENCES`). If this rank
        has reports of samples that do not exist, raises UsageError here, and ConflictError on the
        other ranks.
        """
        fault: UsageError | None = None
        try:
            self.settle_pending()
        except UsageError as error:
            fault = error  # raised below, after the other ranks have been informed
        indices = np.flatnonzero(~np.isnan(self.reported))
        values, local_worlds = self.reported[indices], [_local_world(world)]
        if has_ranks and world > 1:
            own = [*claims, fault is None, len(indices), local_worlds[0]]
            all_claims = _gathered_claims(own, world)
            if fault is None:
                _check_claims([each[:-2] for each in all_claims])
                local_worlds = [each[-1] for each in all_claims]
                indices, values = _gathered(indices, values, [each[-2] for each in all_claims])
        if fault is not None:
            raise fault
        local_world = local_worlds[0] if len({*local_worlds}) == 1 else world
        self.nodes = world // local_world if world % local_world == 0 else 1
        # A new array, since saved states refer to the old one. If a sample was reported twice, the
        # last report counts, which is the same on every rank.
        self.agreed = self.agreed.copy()
        self.agreed[indices] = values
        self.reported = np.full(len(self.agreed), np.nan, np.float32)
        self.agreed_for = epoch


@dataclass(slots=True)
class _Draw:
    """The samples that all ranks together read in an epoch, and this rank's changes to its part."""

    epoch: int
    probabilities: npt.NDArray[np.float32]
    samples: Indices
    replaced: Indices | None = None
    """This rank's replaced samples and their substitutes, of the shape (2, k); None: not yet
    decided."""
    timed: Indices | None = None
    """The samples that are timed for `benefit`, which this rank reads first; None: not yet
    decided."""


@dataclass(slots=True)
class _Sharing:
    """The use of one mount by several jobs."""

    jobs: int = 0
    """The jobs that have sent the mount importances; 0: not known."""
    batch_size: int = 0
    """The batch size of the loader of `enumerate`; 0: not called yet."""
    benefit: float = 1.0

    def note(self, times: Sequence[float], timed: Indices | None, batch_size: int) -> None:
        """Compute `benefit` once all batches of the samples `timed` have come. `times` has the time
        in seconds of the first request, then of the arrival of each batch."""
        count = len(times) - 1
        if timed is None or len(timed) < 2 * BENEFIT_BATCHES * batch_size:
            return
        if count == 2 * BENEFIT_BATCHES:
            # The first batch waits for the workers' start.
            without_s = (times[BENEFIT_BATCHES] - times[1]) / (BENEFIT_BATCHES - 1)
            with_s = (times[-1] - times[BENEFIT_BATCHES]) / BENEFIT_BATCHES
            self.benefit = min(max(without_s / max(with_s, 1e-6), 0.0), _BENEFIT_MAX)


class ImportanceSampler(ChunkShuffleSampler):
    """A sampler that draws a share of a dataset's samples for each epoch, the important ones more
    often. Experimental. README.md has an example, and explains the use by several ranks, nodes and
    jobs.

    An epoch's samples come in chunk-wise random order, each at most once. `share` is the fraction
    of all samples that an epoch has, `floor` the least probability of a sample (`DrawRule`). The
    first `warm_up` epochs have all samples. `importance` computes each sample's importance (None:
    `Loss()`). `substitute` replaces samples that are not in the mount's memory (iCache, section
    III-C): this changes the training data, and only helps on a mount. If a run resumes with another
    number of ranks, in the middle of an epoch with substitutes or timed batches (`benefit`), it may
    repeat or miss some samples of that epoch.

    Call `set_epoch` before each epoch, since an epoch has only one draw. If torch.distributed has
    `world` ranks, all of them must begin each epoch.
    """

    def __init__(
        self,
        dataset: object,
        *,
        share: float = SHARE_DEFAULT,
        floor: float = 0.0,
        warm_up: int = WARM_UP_DEFAULT,
        importance: Importance | None = None,
        substitute: bool = False,
        rank: int | None = None,
        world: int | None = None,
        seed: int = 0,
        group_size: int = GROUP_SIZE_DEFAULT,
        drop_last: bool = False,
    ) -> None:
        """Raises as `ChunkShuffleSampler`, and UsageError for a bad share, floor or warm-up."""
        super().__init__(
            dataset, rank=rank, world=world, seed=seed, group_size=group_size, drop_last=drop_last
        )
        check_number("warm_up", warm_up)
        self.rule = DrawRule(float(share), float(floor))
        self.warm_up = int(warm_up)
        self.substitute = substitute
        importance = Loss() if importance is None else importance
        if isinstance(importance, type) or not hasattr(importance, "measure"):
            raise UsageError(
                f"bad importance {importance!r}: it has no method measure",
                advice="give an instance, such as Loss() or GradientNorm()",
            )
        self._table = _Table(len(self._files), importance)
        # At most one draw. Copies of this sampler share the list, since the hook of `dlcmd run`
        # draws with a copy before this sampler draws.
        self._draws: list[_Draw] = []
        self._sharing = _Sharing()

    @property
    def importance(self) -> Values:
        """Each sample's importance when the epoch began, the same on all ranks; NaN: not known."""
        return self._table.agreed.copy()

    @property
    def ignored(self) -> int:
        """The number of reports that were infinite, NaN or negative."""
        return self._table.ignored

    @property
    def benefit(self) -> float:
        """The factor by which batches come faster from the mount's memory than without it. It is 1
        until it is measured, which needs several jobs on one mount."""
        return self._sharing.benefit

    @property
    def substituted(self) -> int:
        """The number of samples that this rank has replaced in the last drawn epoch."""
        replaced = self._draws[0].replaced if self._draws else None
        return 0 if replaced is None else replaced.shape[1]

    def update(
        self,
        indices: Numbers,
        losses: Losses,
        outputs: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> None:
        """Report a batch for later draws.

        `indices` are its samples' indices in the dataset; `losses` has the shape (batch,), as a
        tensor on any device, an array or a list. Some kinds of importance need `outputs` and
        `targets`. Raises UsageError if shapes do not fit. An index that does not exist may be
        detected only by a later call.
        """
        self._table.report(indices, losses, outputs, targets)

    def weights(self, indices: Numbers, device: torch.device | str = "cpu") -> Tensor:
        """A factor for the loss of each of these samples. With it, the mean loss over many draws is
        that of all samples. With a floor above 0, no factor exceeds share / floor. Raises
        UsageError before the epoch has begun."""
        if not self._draws or self._draws[0].epoch != self.epoch:
            raise UsageError(f"epoch {self.epoch} has not begun: its samples are not drawn yet")
        drawn = self._draws[0]
        share = len(drawn.samples) / max(len(self._files), 1)
        rows = _as_row(_copied_row(indices))
        _check_samples("weights", rows, len(self._files))
        found = torch.from_numpy(weights(drawn.probabilities[rows], share))
        return found.to(device, non_blocking=True)

    def enumerate(
        self, loader: "DataLoader[_Batch]"
    ) -> Iterator[tuple[npt.NDArray[np.int64], _Batch]]:
        """Iterate over the batches of a loader, each preceded by its samples' indices.

        Raises UsageError for a loader of another sampler, without a batch size, or with
        `in_order=False`. With such a loader, the dataset must return each sample's index itself.
        """
        if getattr(loader, "sampler", None) is not self or not loader.batch_size:
            raise UsageError(
                "enumerate takes a DataLoader over this sampler that has a batch size",
                advice="or have the dataset give each sample's index, and call update with it",
            )
        if not getattr(loader, "in_order", True):
            raise UsageError(
                "enumerate needs batches in the order of their samples",
                advice="leave out in_order=False",
            )
        batch_size = self._sharing.batch_size = int(loader.batch_size)
        times = [time.monotonic()]
        samples = np.empty(0, np.int64)
        last: _Iteration | None = None
        for number, batch in enumerate(loader):
            if last is None:
                last = self._last
                assert last is not None
                samples = last.samples
            last.delivered = min((number + 1) * batch_size, len(samples))
            if number < 2 * BENEFIT_BATCHES:
                times.append(time.monotonic())
                self._sharing.note(times, self._draws[0].timed, batch_size)
            yield samples[number * batch_size : (number + 1) * batch_size].copy(), batch

    def state_dict(self, received: int | None = None) -> dict[str, object]:
        """The state of `ChunkShuffleSampler`, with the importances and this rank's reports since
        the epoch began. If all ranks load the state of one, the other ranks' reports of this epoch
        are lost."""
        self._table.settle_pending()
        state = super().state_dict(received)
        return {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in state.items()
        }

    # Overrides of `ChunkShuffleSampler`

    def _begin(self, iteration: "_Iteration", own: EpochPlace | None) -> tuple[EpochPlace, Indices]:
        last = self._last
        was_trained = last is not None and last.is_over and self._table.has_reports
        if was_trained and own is None and self._next is None:
            self._warn_once(
                f"epoch {self.epoch} begins again with the same samples: call set_epoch before"
                " each epoch to draw new ones"
            )
        return super()._begin(iteration, own)

    def _count(self, epoch: int) -> int:
        count = len(self._files)
        return count if epoch < self.warm_up else self.rule.length(count)

    def _shuffled(self, place: EpochPlace) -> tuple[Indices, Indices]:
        drawn, nodes = self._draw(place.epoch), self._table.nodes
        sequence, group = self._chunk_wise(drawn.samples, place.epoch)
        first = (
            place.partitions[0] if place.partitions else Partition(self.world, self.drop_last, 0)
        )
        length = part_length(len(sequence), first.world, drop_last=first.drop_last)
        if nodes == 1 or first.world % nodes or place.epoch < self.warm_up or not length:
            return sequence, group
        # Important samples go to the ranks of their home nodes
        homes = home_nodes(len(self._files), nodes, self.seed)
        per_node = length * (first.world // nodes)
        sequence = at_home(sequence, ~is_low(drawn.probabilities), homes, per_node, nodes)
        starts = range(length, len(sequence), length)
        parts = [self._chunk_wise(each, place.epoch) for each in np.split(sequence, starts)]
        return np.concatenate([each for each, _ in parts]), np.concatenate([to for _, to in parts])

    def _chunk_wise(self, samples: Indices, epoch: int) -> tuple[Indices, Indices]:
        """These samples in chunk-wise order, and the group of each."""
        files = self._files.files.subset(samples)
        sequence, group = files.shuffled(self.seed, epoch, self.group_size)
        return samples[sequence], group

    def _part(self, place: EpochPlace) -> tuple[Indices, Indices]:
        position = place.position or 0  # cut off last: substitutes are those of the whole part
        samples, ends = super()._part(replace(place, position=0))
        if self.substitute:
            samples, ends = self._substitute(samples, ends, place)
        timed = self._timed(samples, place)
        if len(timed):
            is_timed = np.zeros(len(self._files), np.bool_)
            is_timed[timed] = True
            samples = np.concatenate((timed, samples[~is_timed[samples]]))
            ends = np.array([len(samples)])
        samples, ends = samples[position:], ends[ends > position] - position
        if self._files.mount is not None and not has_joined():
            stream = f"importance:{os.getpid()}:{self.rank}"
            order = explicit(epoch=place.epoch, entries=self._files.files.entries[samples])
            self._send(lambda control: control.announce(stream, [order]))
        return samples, ends

    def _state(self, place: EpochPlace, received: int = 0) -> dict[str, object]:
        # Torchdata requests the state with each batch, so the arrays are not copied.
        drawn = [each for each in self._draws if each.epoch == place.epoch]
        replaced, timed = (drawn[0].replaced, drawn[0].timed) if drawn else (None, None)
        return {
            **super()._state(place, received),
            "share": self.rule.share,
            "floor": self.rule.floor,
            "warm_up": self.warm_up,
            "agreed": torch.from_numpy(self._table.agreed),
            "agreed_for": self._table.agreed_for,
            "nodes": self._table.nodes,
            "reported": torch.from_numpy(self._table.reported),
            "replaced": None if replaced is None else torch.from_numpy(replaced),
            "timed": None if timed is None else torch.from_numpy(timed),
        }

    def _load(self, state: Mapping[str, object]) -> EpochPlace:
        before = self.rule, self.warm_up
        count = len(self._files)
        try:
            self._check_origin(state)
            loaded = _LoadedImportance(state, count)
            self.rule, self.warm_up = loaded.rule, loaded.warm_up
            place = super()._load(state)
        except (UsageError, ConflictError):
            self.rule, self.warm_up = before
            raise
        table = self._table
        table.forget_pending()
        table.agreed, table.reported = loaded.agreed, loaded.reported
        table.agreed_for, table.nodes = loaded.agreed_for, loaded.nodes
        self._draws.clear()
        if place.epoch == table.agreed_for:
            drawn = self._draw(place.epoch)
            drawn.replaced, drawn.timed = loaded.replaced, loaded.timed
        return place

    # Draws

    def _draw(self, epoch: int) -> _Draw:
        """The draw of an epoch, made at the first call, after the ranks have agreed on the
        importance. Raises as `_Table.agree`."""
        if self._draws and self._draws[0].epoch == epoch:
            return self._draws[0]
        table, count = self._table, len(self._files)
        if table.agreed_for != epoch:
            table.agree(epoch, self.world, self._claims(epoch), has_ranks=_has_ranks(self.world))
            is_known = not np.isnan(table.agreed).all() or not count
            if self.rank == 0 and epoch and epoch >= self.warm_up and not is_known:
                self._warn_once(
                    f"all {table.ignored:,} reported losses are infinite, negative or NaN, so"
                    " samples are drawn at random"
                    if table.ignored
                    else "no loss was reported, so samples are drawn at random: call update"
                )
        if epoch < self.warm_up:
            drawn = _Draw(epoch, np.ones(count, np.float32), np.arange(count))
        else:
            found = self.rule.probabilities(table.agreed, self.seed, epoch)
            drawn = _Draw(epoch, found, self.rule.draw(found, self.seed, epoch))
            self._send_importance(found)
        self._draws[:] = [drawn]
        return drawn

    def _claims(self, epoch: int) -> tuple[int, ...]:
        """The numbers that must be equal on all ranks, one for each of `_DIFFERENCES`."""
        files = self._files
        samples = f"{files} {files.identity} {self._digest}"
        arguments = repr((self.seed, self.group_size, self.drop_last, self.rule, self.warm_up))
        return epoch, *(xxh3_64_intdigest(text.encode()) >> 1 for text in (samples, arguments))

    def _substitute(
        self, samples: Indices, ends: Indices, place: EpochPlace
    ) -> tuple[Indices, Indices]:
        """Replace samples of this rank's part by their substitutes, which are chosen once,
        when the epoch begins. Returns the part in chunk-wise order and the ends of its groups."""
        drawn = self._draw(place.epoch)
        if drawn.replaced is None:
            drawn.replaced = np.empty((2, 0), np.int64)
            if not place.position and not place.partitions and place.epoch >= self.warm_up:
                drawn.replaced = self._substitutes(samples, drawn)
        if place.partitions or not drawn.replaced.size:
            return samples, ends
        becomes = np.arange(len(self._files))
        becomes[drawn.replaced[0]] = drawn.replaced[1]
        samples, group = self._chunk_wise(becomes[samples], place.epoch)
        return samples, group_ends(group)

    def _substitutes(self, samples: Indices, drawn: _Draw) -> Indices:
        is_cached = self._is_cached(default=True)  # nothing is replaced without an answer
        chunks, low = self._files.files.chunks, is_low(drawn.probabilities)
        # A substitute comes from this rank's own chunks, so that two ranks never choose the same
        may_replace = low & (chunks % self.world == self.rank)
        may_replace[drawn.samples] = False
        places, others = substituted(
            samples, low, is_cached, may_replace, chunks, self.seed, drawn.epoch
        )
        return np.stack((samples[places], others))

    def _timed(self, samples: Indices, place: EpochPlace) -> Indices:
        """The samples that this rank reads first, to measure `benefit`; mostly none."""
        drawn = self._draw(place.epoch)
        if drawn.timed is None:
            drawn.timed = np.empty(0, np.int64)
            size = self._sharing.batch_size * BENEFIT_BATCHES
            if self._sharing.jobs > 1 and size and not place.position and not place.partitions:
                is_cached = self._is_cached(default=False)
                there = samples[is_cached[samples]][:size]
                missing = samples[~is_cached[samples]][:size]
                if len(there) == len(missing) == size:
                    drawn.timed = np.concatenate((missing, there))
        mine = np.isin(drawn.timed, samples)  # a state of another rank may have been loaded
        return drawn.timed[mine]

    def _is_cached(self, *, default: bool) -> npt.NDArray[np.bool_]:
        """Whether each sample is in the mount's memory; `default` for all if no mount answers."""
        is_cached = np.full(len(self._files), default)

        def ask(control: Control) -> None:
            is_cached[:] = control.resident(self._files.files.entries)

        self._send(ask)
        return is_cached

    def _send_importance(self, probabilities: npt.NDArray[np.float32]) -> None:
        if os.environ.get("LOCAL_RANK", "0") != "0":  # one process of a node is enough
            return
        names = [os.environ[name] for name in _JOB_NAMES if os.environ.get(name)]
        job, entries = (names or [str(os.getpid())])[0][:_JOB_NAME_MAX], self._files.files.entries
        nodes = self._table.nodes
        if nodes > 1 and self.world % nodes == 0:  # samples of other nodes are not read
            homes = home_nodes(len(entries), nodes, self.seed)
            is_elsewhere = homes != self.rank // (self.world // nodes)
            is_elsewhere &= ~is_low(probabilities)
            probabilities = np.where(is_elsewhere, np.float32(0), probabilities)

        def send(control: Control) -> None:
            self._sharing.jobs = control.values(
                entries,
                probabilities,
                job=job,
                benefit=self._sharing.benefit,
                substitutes=self.substitute,
            )

        self._send(send)

    def _send(self, send: Callable[[Control], None]) -> None:
        """Connect to the mount of the samples, if they have one, and call `send`. An error is
        logged once, and training goes on."""
        files, mount = self._files, self._files.mount
        if mount is None:
            return
        try:
            with Control.connect(mount, identity=files.identity, version=files.version) as control:
                send(control)
        except DieselError as error:
            self._warn_once(f"the mount on {mount} did not get the importances: {error}")


class _LoadedImportance:
    """The parts of a state that `ImportanceSampler` adds. Raises UsageError for a bad state."""

    def __init__(self, state: Mapping[str, object], count: int) -> None:
        share, floor = state.get("share"), state.get("floor")
        warm_up, agreed_for = state.get("warm_up"), state.get("agreed_for")
        if not isinstance(share, float | int) or not isinstance(floor, float | int):
            raise UsageError("this is not a state of ImportanceSampler: it has no share and floor")
        if not isinstance(warm_up, int) or not isinstance(agreed_for, int):
            raise UsageError("this is not a state of ImportanceSampler: it has no warm-up")
        check_number("warm_up", warm_up)
        self.rule, self.warm_up, self.agreed_for = DrawRule(share, floor), warm_up, agreed_for
        nodes = state.get("nodes", 1)
        if not isinstance(nodes, int) or not 1 <= nodes <= WORLD_MAX:
            raise UsageError(f"bad nodes {nodes!r} in a state of ImportanceSampler")
        self.nodes = nodes
        self.agreed = _loaded_values(state.get("agreed"), count)
        self.reported = _loaded_values(state.get("reported"), count)
        replaced = state.get("replaced")
        self.replaced = None if replaced is None else _loaded_samples(replaced, (2, -1), count)
        timed = state.get("timed")
        self.timed = None if timed is None else _loaded_samples(timed, (-1,), count)


def _loaded_values(row: object, count: int) -> Values:
    if not isinstance(row, Tensor) or row.shape != (count,):
        raise UsageError(f"this is not a state of ImportanceSampler for {count} samples")
    values: Values = row.detach().cpu().to(torch.float32).numpy().copy()
    if (np.isinf(values) | (values < 0)).any():
        raise UsageError("a state of ImportanceSampler has a bad importance")
    return values


def _loaded_samples(rows: object, shape: tuple[int, ...], count: int) -> Indices:
    try:
        found = _as_row(rows).reshape(shape).copy()
    except (TypeError, ValueError):
        raise UsageError("a state of ImportanceSampler has bad substitutes") from None
    if found.size and not 0 <= int(found.min()) <= int(found.max()) < count:
        raise UsageError("a state of ImportanceSampler has bad substitutes")
    return found


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def _copied_row(indices: Numbers) -> "Tensor | npt.NDArray[np.int64]":
    """A copy of the indices as one row, on their device: the loop may change its own array in
    place. Raises UsageError if they are not whole numbers."""
    if isinstance(indices, Tensor):
        row = indices.detach().reshape(-1).clone()
        if row.is_floating_point() or row.is_complex() or row.dtype == torch.bool:
            raise UsageError(f"indices of samples are whole numbers, not {row.dtype}")
        return row
    try:
        numbers = np.array(indices).reshape(-1)
    except ValueError as error:
        raise UsageError(f"indices of samples are one row of whole numbers: {error}") from error
    if numbers.size and numbers.dtype.kind not in "iu":
        raise UsageError(f"indices of samples are whole numbers, not {numbers.dtype}")
    return numbers.astype(np.int64, copy=False)


def _check_samples(what: str, indices: Indices, samples: int) -> None:
    is_wrong = (indices < 0) | (indices >= samples)
    if is_wrong.any():
        wrong = indices[is_wrong][0]
        raise UsageError(f"{what} was called for a sample {wrong}; there are {samples}")


def _as_row(indices: Numbers) -> npt.NDArray[np.int64]:
    if isinstance(indices, Tensor):
        indices = indices.detach().cpu().numpy()
    return np.asarray(indices, np.int64).reshape(-1)


def _has_ranks(world: int) -> bool:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    return bool(distributed.get_world_size() == world)


def _local_world(world: int) -> int:
    """The number of ranks on this node, from torchrun's or SLURM's variable, or else `world`."""
    found = [os.environ.get(name, "") for name in _LOCAL_WORLDS]
    return next((int(each) for each in found if each.isdecimal() and int(each)), world)


def _device_of_ranks() -> str:
    """The device of tensors that torch.distributed can exchange."""
    if torch.distributed.get_backend() == "nccl":
        return f"cuda:{torch.cuda.current_device()}"
    return "cpu"


def _gathered_claims(own: Sequence[int], world: int) -> list[list[int]]:
    """The numbers of each rank. All ranks call it together."""
    row = torch.tensor(own, device=_device_of_ranks())
    rows = [torch.zeros_like(row) for _ in range(world)]
    torch.distributed.all_gather(rows, row)
    return [each.tolist() for each in rows]


def _check_claims(all_claims: Sequence[Sequence[int]]) -> None:
    """Raise ConflictError if ranks differ (`_DIFFERENCES`), or if a rank's last number is 0: its
    reports are invalid."""
    for rank, claims in enumerate(all_claims):
        for own, first, what in zip(claims, all_claims[0], _DIFFERENCES, strict=False):
            if own != first:
                raise ConflictError(
                    f"the ranks of an ImportanceSampler do not fit: rank {rank} {what}",
                    advice="give all ranks the same dataset, arguments and epochs",
                )
        if not claims[-1]:
            raise ConflictError(f"rank {rank} has reported samples that do not exist")


def _gathered(indices: Indices, values: Values, lengths: Sequence[int]) -> tuple[Indices, Values]:
    """The reports (indices and values) of all ranks, those of rank 0 first. `lengths` is the number
    of reports of each. All ranks call it together."""
    device = _device_of_ranks()
    row = torch.zeros((2, max(lengths)), dtype=torch.float64, device=device)
    row[0, : len(indices)] = torch.from_numpy(indices.astype(np.float64))
    row[1, : len(values)] = torch.from_numpy(values.astype(np.float64))
    rows = [torch.zeros_like(row) for _ in lengths]
    torch.distributed.all_gather(rows, row)
    found = [each[:, :length].cpu().numpy() for each, length in zip(rows, lengths, strict=True)]
    everything = np.concatenate(found, axis=1)
    return everything[0].astype(np.int64), everything[1].astype(np.float32)
