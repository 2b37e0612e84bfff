"""The planner of a process that called `diesel_fs.torch.join`, as a program with an argument N.

It prints the settings of the hook (N epochs are announced ahead) in one line when it listens, and
ends with the process that has started it, when its standard input ends.
"""

import sys

from .server import TrainingPlanner


def main() -> None:
    """Serve until the standard input ends; then say what could not be planned."""
    with TrainingPlanner() as planner:
        planner.start()
        sys.stdout.write(planner.environment(ahead=int(sys.argv[1])) + "\n")
        sys.stdout.flush()
        sys.stdin.read()
    for line in planner.summary.lines():
        sys.stderr.write(f"diesel_fs.torch: {line}\n")


if __name__ == "__main__":
    main()
