"""The operator: it makes datasets by Jobs, and runs training jobs on the nodes that suit them.

`OPERATOR.md` is the authority. `datasets.py` and `training.py` decide, from what is in the cluster,
what to do next: they are pure. `controller.py` reads, asks them, and applies their decisions; it
holds no state, so it may be killed at any time. Start reading at `datasets.py`.
"""
