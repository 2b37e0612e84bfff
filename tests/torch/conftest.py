"""Leaves the tests of `clients/` to `make test-clients`, which makes the environment they need."""

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore that folder unless the command names it."""
    is_named = any("torch/clients" in argument for argument in config.args)
    return True if collection_path.name == "clients" and not is_named else None
