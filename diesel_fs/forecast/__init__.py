"""Forecasts what a training job will read, hit, cost and wait for, before it runs. Pure.

Start with `simulate.forecast`. `nodes.py` describes a job and its machines. `reads.py` turns orders
into the reads of a mount, `kept.py` replays these through the eviction policies or the order log,
and `simulate.py` adds time. `smallest.py` finds the smallest cache without stalls, `report.py`
recommends a cache.
"""
