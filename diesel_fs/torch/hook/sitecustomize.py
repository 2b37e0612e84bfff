"""Installs the hook. Python imports this module when it starts, since its folder is first on
PYTHONPATH."""

import os
import sys
from contextlib import suppress
from importlib import import_module, machinery, util

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_the_hidden_one() -> None:
    """Run the `sitecustomize` that Python would have found without this module."""
    spec = machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


with suppress(Exception):  # for example in a Python that is too old
    import_module("diesel_hook").install_from_environment()
# The folder is no longer needed, and nothing in it may hide a module of the user's.
sys.path[:] = [each for each in sys.path if os.path.abspath(each or ".") != _HERE]
_run_the_hidden_one()
