"""Training scripts as people write them. They know nothing of DIESEL-FS; only `seen.py`, to which
they report the samples that they got, belongs to the tests.

They run in an environment of their own (`.venv/clients`), in which diesel_fs is not imported:
`python -m scripts.imagenet FOLDER` in the folder above.
"""

import runpy
from pathlib import Path

# As the demo does: a torchvision that was built for CUDA cannot be imported beside another torch.
runpy.run_path(str(Path(__file__).parents[4] / "deploy" / "torchvision_operators.py"))
