"""The planner as a program, which `diesel_fs.torch.join` starts.

It prints the hook's settings as one line of JSON when it accepts connections. It ends when its
standard input ends: so it ends with the process that started it.
"""

import json
import sys

from .server import PlanServer


def main() -> None:
    with PlanServer(_print_error) as planner:
        planner.start()
        sys.stdout.write(json.dumps(planner.settings()) + "\n")
        sys.stdout.flush()
        sys.stdin.read()
    for line in planner.summary.lines():
        _print_error(line)


def _print_error(text: str) -> None:
    sys.stderr.write(f"diesel_fs.torch: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
