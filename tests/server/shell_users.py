"""Users with a shell: `dlcmd` as a program, with an address, a name and a key file."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from diesel_fs.credentials import Credentials
from tests.cli.conftest import CommandResult


def program_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our environment without options of DIESEL-FS and proxies, with the path of the packages."""
    kept = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith("DIESEL_") and "proxy" not in name.lower()
    }
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(more or {})}


@dataclass(frozen=True, slots=True)
class ShellUser:
    """A user with a shell; without a name, one with direct access."""

    url: str
    name: str = ""
    key_file: Path | None = None

    def __call__(
        self,
        *words: str | Path,
        code: int = 0,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
    ) -> CommandResult:
        result = self.run(*words, stdin=stdin, environment=environment)
        assert result.code == code, (words, result)
        assert "Traceback" not in result.err or "-v" in words
        return result

    def run(
        self, *words: str | Path, stdin: bytes = b"", environment: Mapping[str, str] | None = None
    ) -> CommandResult:
        own = {"DIESEL_URL": self.url}
        if self.name:
            own["DIESEL_USER"] = self.name
        who = ["--key-file", str(self.key_file)] if self.key_file else []
        done = subprocess.run(
            [sys.executable, "-m", "dlcmd", *who, *map(str, words)],
            input=stdin,
            capture_output=True,
            env=program_environment({**own, **(environment or {})}),
            timeout=120,
            check=False,
        )
        return CommandResult(done.returncode, done.stdout, done.stderr.decode())


def user_with(credentials: Credentials, url: str, folder: Path) -> ShellUser:
    """A user with a key, which lies in a folder from now on."""
    key_file = folder / f"{credentials.user}.key"
    key_file.touch(mode=0o600)
    key_file.write_text(credentials.key_text + "\n")
    return ShellUser(url, credentials.user, key_file)
