"""The checks of `dlcmd doctor`: of this machine, its mounts, and a repository.

A check is a pure function (`checks.py`) from facts to findings (`findings.py`). The facts come from
`machine.py`, `places.py` and `stores.py`, which change nothing that stays. `probes.py` runs them
side by side, each with a time limit. Start at `diagnosis.py`, which puts these together.
"""
