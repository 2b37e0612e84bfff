"""Each query is a child process."""

import os
import stat
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click

from diesel_fs.errors import ConflictError, DieselError, NotFoundError, UsageError
from diesel_fs.system.atomic_file import atomic_file, write_error

from ..args.options import global_flags
from ..show.output import bytes_text, print_json, print_line, print_note
from .archive import ArchiveMember, members, packed
from .checks import MountFacts
from .findings import Finding
from .places import all_mounts, mount_facts
from .redaction import Redactor, known_secrets

MOUNTS_AT_ONCE = 16

ENDINGS = (".tar.gz", ".tgz")


@dataclass(frozen=True, slots=True)
class Bundle:
    file: Path
    logs: Sequence[Path]
    yes: bool
    dry_run: bool

    def check(self) -> None:
        """Checks the options before anything is examined. Raises UsageError for another ending or a
        log that is no file, ConflictError if the file exists, NotFoundError for an unreadable
        log."""
        if not self.file.name.endswith(ENDINGS):
            raise UsageError(f"{self.file} does not end in .tar.gz", advice="name it help.tar.gz")
        if os.path.lexists(self.file):
            raise ConflictError(
                f"{self.file} exists already", advice="name a file that does not exist"
            )
        for log in self.logs:
            try:
                is_file = stat.S_ISREG(log.stat().st_mode)
            except OSError as error:
                raise NotFoundError(f"cannot read the log {log}: {error.strerror}") from error
            if not is_file:  # a fifo would never end
                raise UsageError(f"{log} is not a regular file")

    def write(self, findings: Sequence[Finding]) -> None:
        """Writes the archive if the user confirms it or has given `yes`. Raises DieselError."""
        try:
            settings = global_flags().settings()
        except DieselError:  # the findings say why
            settings = None
        mounts: list[MountFacts] = []
        # Without /proc, or a process to start, an archive without mounts is better than none
        with suppress(OSError, RuntimeError), ThreadPoolExecutor(MOUNTS_AT_ONCE) as threads:
            mounts += threads.map(mount_facts, all_mounts())
        redactor = Redactor(known_secrets(settings))
        files = members(settings, findings, mounts, self.logs, redactor)
        if self.dry_run or not self.yes:
            _print_list(files)
        if self.dry_run:
            self._print_json(files, 0)
            return
        if not self.yes and not self._is_confirmed():
            print_note("nothing has been written")
            return
        content = packed(files)
        try:
            with atomic_file(self.file, mode=0o600) as handle:
                handle.write(content)
        except OSError as error:
            raise write_error(self.file, error) from error
        if self.yes:  # after writing: a reader of the list may end early, and this program with it
            _print_list(files)
        size = bytes_text(len(content))
        print_line(f"wrote {self.file} ({size}); look into it before you send it")
        self._print_json(files, len(content))

    def _is_confirmed(self) -> bool:
        if global_flags().json or not (sys.stdin and sys.stdin.isatty()):
            raise UsageError(f"this would write {self.file}", advice="confirm it with --yes")
        return click.confirm(f"write {self.file}?", err=True)

    def _print_json(self, files: list[ArchiveMember], size: int) -> None:
        if global_flags().json:
            described = [{"name": each.name, "bytes": len(each.content)} for each in files]
            print_json({"file": str(self.file), "bytes": size, "members": described})


def _print_list(files: list[ArchiveMember]) -> None:
    for member in files:
        print_line(f"{bytes_text(len(member.content)):>9}  {member.name}")
