"""`recover`: builds the metadata of a dataset again from its chunks, which are the truth.
`expected_chunks.py` refuses a rebuild that would lose files. Blocking.
"""

from contextlib import suppress

import numpy as np

from ..errors import DieselError, FormatError
from ..format.chunk_id import lowest_id
from ..format.snapshot.diff import diff_snapshots
from ..format.snapshot.reader import Snapshot
from ..names import shown
from .expected_chunks import FILES_NAMED_MAX, LostChunks, RebuildSource
from .interface import Findings, ReportProgress, check_recover_options, no_progress
from .stored import StoredRepository
from .validation import CLOCK_ALLOWANCE_S, PUT_WINDOW_S


def recover(
    repository: StoredRepository,
    name: str,
    since_s: float | None = None,
    progress: ReportProgress = no_progress,
    *,
    forget_lost: bool = False,
) -> Findings:
    """`Repository.recover`."""
    check_recover_options(since_s, forget_lost=forget_lost)
    findings = Findings()
    if isinstance(repository.meta_problem, FormatError):
        _make_metadata_anew(repository, name, findings)
    info = repository.dataset(name)
    meta = repository.meta
    repository.clock.check_local_clock()  # the new version is a time by this clock
    if info.head is None and since_s is not None:
        findings.notes.append("the metadata store does not know the dataset: all chunks are read")
        since_s = None
    before: Snapshot | None = None
    if forget_lost:
        with suppress(DieselError):  # only for the report
            before = repository.view_of(info)
    chunks = RebuildSource(
        repository, meta, name, info.identity, info.head,
        forget_lost=forget_lost, progress=progress, report=findings,
    )  # fmt: skip
    try:
        if since_s is None:
            repository.rebuild(chunks, info)
        else:
            # A chunk committed at `since_s` may be this much older, by a clock that was behind
            first = lowest_id(int(since_s) - PUT_WINDOW_S - CLOCK_ALLOWANCE_S)
            for batch in list(chunks.since(first)):  # reads all chunks before any is committed
                repository.commit_batches(info.identity, batch)
    except LostChunks as error:
        findings.notes.append(f"{error.message}: {error.advice}")
        with suppress(DieselError):
            view = repository.view_of(info)
            findings.files, findings.bytes = view.file_count, view.byte_count
        return findings
    repository.publish(name, full=True)
    if before is not None:
        findings.notes += _consequences(before, repository.view(name))
    head = meta.head(name)
    findings.files, findings.bytes = head.files, head.bytes
    return findings


def _consequences(before: Snapshot, after: Snapshot) -> list[str]:
    """The effects of an accepted loss. A lost chunk may have replaced or deleted entries, so an
    older version of a file may show again, and a deleted file may be back."""
    diff = diff_snapshots(before, after)
    forgotten = np.ones(len(before), np.bool_)
    forgotten[diff.same_path[diff.same_path >= 0]] = False
    consequences = (
        ("forgotten", before, forgotten),
        ("an older version shows now", after, (diff.unchanged < 0) & (diff.same_path >= 0)),
        ("it had been deleted, and is back", after, diff.same_path < 0),
    )
    lines = [
        f"{what}: {shown(view.path(i))}"
        for what, view, which in consequences
        for i in np.flatnonzero(which).tolist()
    ]
    more = len(lines) - FILES_NAMED_MAX
    return lines[:FILES_NAMED_MAX] + ([f"and {more} more entries"] if more > 0 else [])


def _make_metadata_anew(repository: StoredRepository, name: str, findings: Findings) -> None:
    problem = repository.meta_problem
    assert problem is not None
    findings.notes.append(f"{problem.message}: it was renamed, and a new one made")
    repository.open_metadata(create=True, replace_damaged=True)
    for other in repository.datasets():
        if other.name != name:
            try:
                repository.begin(other.name)
            except LostChunks as error:  # `other` has no metadata: readers get its snapshot
                findings.problems.append(error.message)
