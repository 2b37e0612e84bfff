"""Writes a page or plot to a file that the user names."""

from pathlib import Path

from diesel_fs.system.atomic_file import atomic_file, write_error


def write_page(file: Path, text: str) -> None:
    """Writes the file whole or not at all. Raises UsageError, DieselError."""
    try:
        with atomic_file(file, mode=0o666, sync=False) as opened:
            opened.write(text.encode())
    except OSError as error:
        raise write_error(str(file), error) from error
