"""The repository of a process that opens the object store and the metadata store itself."""

from ..format.snapshot.reader import Snapshot
from .interface import Findings, PurgeOptions, PurgeReport, ReportProgress, no_progress
from .purge import purge, reclaimable_bytes
from .recover import recover
from .stored import StoredRepository
from .verify import verify


class LocalRepository(StoredRepository):
    """All of `Repository` over two stores. The long jobs are functions over what they need."""

    def recover(
        self,
        name: str,
        since_s: float | None = None,
        progress: ReportProgress = no_progress,
        *,
        forget_lost: bool = False,
    ) -> Findings:
        return recover(self, name, since_s, progress, forget_lost=forget_lost)

    def verify(
        self, name: str, *, headers_only: bool = False, progress: ReportProgress = no_progress
    ) -> Findings:
        return verify(self, name, headers_only=headers_only, progress=progress)

    def purge(
        self,
        name: str,
        options: PurgeOptions | None = None,
        progress: ReportProgress = no_progress,
    ) -> PurgeReport:
        return purge(self, name, options or PurgeOptions(), progress)

    def reclaimable_bytes(self, name: str, view: Snapshot) -> int:
        return reclaimable_bytes(self, view)
