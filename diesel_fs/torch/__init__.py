"""For PyTorch: training scripts that announce what they will read, without a change to them.

`hook/` is what `dlcmd run` puts into the processes of a training command; it needs nothing but
Python's standard library. `planner/` is the launcher's side, which turns what they say into plans
for the mounts. `join` does the same from inside a script. `fsspec.py` is the file system
`diesel://`, by which pandas and others read datasets. README.md says what users may expect.
Samplers and datasets are to come.
"""

from .join import join

__all__ = ["join"]
