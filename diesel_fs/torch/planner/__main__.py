"""The planner of a process that called `diesel_fs.torch.join`, as a program.

When it listens, it prints the settings of the hook in one line. It ends with the process that
started it, when its standard input ends.
"""

import json
import sys

from .server import PlanServer


def main() -> None:
    """Serve until the standard input ends; then print what could not be planned."""
    with PlanServer(_say) as planner:
        planner.start()
        sys.stdout.write(json.dumps(planner.settings()) + "\n")
        sys.stdout.flush()
        sys.stdin.read()
    for line in planner.summary.lines():
        _say(line)


def _say(text: str) -> None:
    sys.stderr.write(f"diesel_fs.torch: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
