"""What `dlcmd doctor` and `dlcmd support` look at: this machine, its mounts, and a repository.

A check is a pure function from facts to findings (`checks.py`; `findings.py` says what a finding
is). The facts come from `machine.py` (this machine and the user's folders), `places.py` (mounts,
and folders that the user names) and `stores.py` (the repository), which change nothing that stays.
`probes.py` runs them side by side, each with a time limit. `trial.py` is a program of its own that
tries a mount. `archive.py` makes the archive of `dlcmd support`, and `redaction.py` takes the
secrets out of it.

The verbs are in `../verbs/`.
"""
