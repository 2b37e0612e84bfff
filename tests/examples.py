"""The number of examples that property tests draw, in each tier.

A test sets its number of examples in the deep tier. In the fast tier it draws at most
`QUICK_EXAMPLES`, in runs of at most `QUICK_STEPS` steps: enough for the faults that a change brings
in, not for the rare ones that the deep tier keeps searching for.
"""

import os

from hypothesis import HealthCheck, settings

QUICK_EXAMPLES, QUICK_STEPS = 25, 10
DEEP_PROFILE = "deep"
"""Chosen by `--hypothesis-profile`, as `make test-deep` does."""

_DEEP_STEPS = 50  # hypothesis' own


def register_profiles() -> None:
    """Register the profiles of both tiers with hypothesis, and choose the quick one.

    On a busy machine a single example may be slow; that is no failure. If the environment variable
    `CI` is set (`.ci/run` sets it), examples are derived from each test's code, so that the verdict
    on a commit does not depend on a seed.
    """
    common = settings(
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        print_blob=True,
        derandomize="CI" in os.environ,
    )
    settings.register_profile(DEEP_PROFILE, common)
    settings.register_profile(
        "quick", common, max_examples=QUICK_EXAMPLES, stateful_step_count=QUICK_STEPS
    )
    settings.load_profile("quick")


def examples(
    count: int, *, steps: int = _DEEP_STEPS, suppress: tuple[HealthCheck, ...] = ()
) -> settings:
    """The settings of a test that draws `count` examples in the deep tier; a state machine takes up
    to `steps` steps in each. `suppress` are further health checks to suppress."""
    if settings.get_current_profile_name() != DEEP_PROFILE:
        count, steps = min(count, QUICK_EXAMPLES), min(steps, QUICK_STEPS)
    return settings(
        max_examples=count,
        stateful_step_count=steps,
        suppress_health_check=[HealthCheck.too_slow, *suppress],
    )
