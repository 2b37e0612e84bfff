"""Experiments that repeat figures and tables of papers, or compare a simulation with real runs.

Each was run by hand once or a few times, and is kept so that it can be run again. They are started
by name as the benchmarks are (`make bench ARGS=lrfu`), print rows of the same table, and stand in
RESULTS.md; README.md shows none of them.

| name | repeats |
| --- | --- |
| accuracy | figure 13 of the paper (DIESEL): the accuracy that chunk-wise shuffle costs |
| tasks-clients, tasks-deaths | figures 11a and 6 of the paper |
| access-* | figure 14 of the paper: data access time; requests of chunk-wise orders |
| importance-* | tables and figures of iCache (HPCA 2023) |
| order-* | figure 5 of LCache |
| training-* (not -overhead) | epochs from a slow store, beside loaders of other formats |
| training-steps, training-tuning, lrfu | the three experiments of DLCache |
| plan-*, lobster-*, rank-balance | tables of Lobster (ICPP 2022); our forecast beside real tasks |
"""
