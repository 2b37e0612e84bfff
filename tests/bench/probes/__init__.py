"""Programs that use the library as a user's program does, and measure themselves.

Each runs in a process of its own, so that no other memory, caches or garbage are measured, and
prints one JSON object. Starting Python and importing are not in the figures.
"""

import json
import sys

from ..dlcmd import DEADLINE_S, Dlcmd, last_line


def run(
    probe: str, dlcmd: Dlcmd, *arguments: str, fresh_cache: str = "", deadline_s: float = DEADLINE_S
) -> dict[str, float]:
    """The output of a probe, in a repository. `fresh_cache`: an empty folder for private copies, as
    a new user has it."""
    environment = dict(dlcmd.environment)
    if fresh_cache:
        environment["XDG_CACHE_HOME"] = fresh_cache
    module = f"tests.bench.{probe}" if "." in probe else f"{__name__}.{probe}"
    command = [sys.executable, "-m", module, dlcmd.url, *arguments]
    report: dict[str, float] = json.loads(last_line(command, environment, deadline_s=deadline_s))
    return report
