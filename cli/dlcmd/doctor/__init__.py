"""The checks of `dlcmd doctor`: of this machine, its mounts, and a repository.

A check is a pure function from facts to findings (`checks.py`; `findings.py`). The facts come from
`machine.py` (this machine and the user's folders), `places.py` (mounts, and folders that the user
names) and `stores.py` (the repository), which change nothing that stays. `probes.py` runs them side
by side, each with a time limit. `trial.py` is a program of its own that tries a mount. Start at
`diagnosis.py`, which puts these together.

`speed.py` measures rates for `--speed`. For `--bundle`, `bundle.py` writes the archive,
`archive.py` makes its contents, and `redaction.py` takes the secrets out.
"""
