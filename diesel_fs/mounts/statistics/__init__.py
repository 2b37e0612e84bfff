"""The figures that a mount keeps about itself, and their publication.

- `waits.py` counts how long readers waited, and for what. Start here.
- `reader_groups.py` finds the rank or program that a waiting thread belongs to.
- `mount_metrics.py` turns the statistics into metrics (METRICS.md describes each).
- `metrics_port.py` serves the metrics to Prometheus.

One rule: the server process counts, and other processes request the figures. Nothing here may delay
an answer to the kernel.
"""
