"""Makes a torchvision that was built for CUDA importable beside a torch that was not.

Such a torchvision cannot load its compiled operators, and its import fails with "operator
torchvision::nms does not exist", because it registers two of them by name. Import this module
before torchvision: if the operators do not load, it declares these two, without a kernel, so calls
still fail.
"""

from importlib.util import find_spec
from pathlib import Path

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"  # csrc/ops/nms.cpp


def _operators_load() -> bool:
    """torchvision may load the library again later."""
    spec = find_spec("torchvision")
    folders = spec.submodule_search_locations if spec is not None else None
    libraries = [path for folder in folders or [] for path in Path(folder).glob("_C*.so")]
    try:
        for library in libraries:
            torch.ops.load_library(str(library))
    except OSError:
        return False
    return bool(libraries)


if not _operators_load():
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", _SCHEMA)
