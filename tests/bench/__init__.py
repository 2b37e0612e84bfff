"""Measures DIESEL-FS against its peers and its own limits, in one run: `make bench`.

`cases/` has the benchmarks, `experiments/` those that repeat papers, `peers/` the programs that
they are compared with, and `probes/` programs that measure themselves in a process of their own.
The modules here are shared: `inputs` (fixed data), `workbench` (folders and rounds), `epochs`
(orders of files, which `reader.c` reads and checks), `loops` (the same orders, read by Python code
as people write it), `store` (an object store with a delay and a limited bandwidth), `samples`
(alternating runs, medians), `report` (rows and table), `results` (the page RESULTS.md), `plot`,
`running` (a task of some nodes), `client_process` (programs that read on its nodes). A new
benchmark is a function that returns rows, and a line in `benchmarks.py`.
"""
