"""Forecasts what a training job will read, hit, cost and wait for, before it runs.

`simulate.py` has the whole of it in one call; read it first. `nodes.py` describes a job: its nodes,
their memory and disks, the network, the store and the model. `reads.py` turns orders into what a
mount asks for, with the mount's own rules. `kept.py` runs these reads through the eviction policies
of `cache/policies/eviction.py`, or through the rule of the order log. `simulate.py` then lets time
pass, iteration by iteration. `smallest.py` finds the smallest cache without stalls. `report.py`
draws and recommends. All of it is pure: no I/O and no clock.
"""
