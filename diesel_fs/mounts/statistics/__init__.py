"""What a mount measures about itself, and how it publishes that.

- `waits.py` counts how long readers waited, and for what. Start here.
- `reader_groups.py` finds the rank or program that a waiting thread belongs to.
- `mount_metrics.py` turns the statistics into metrics (METRICS.md describes each).
- `metrics_port.py` serves the metrics to Prometheus.

One rule: the server process measures, and others ask it. Nothing here may delay an answer to the
kernel.
"""
