"""Measures DIESEL-FS against its peers and its own limits, in one run: `make bench`.

`benchmarks` is the table of names. `cases/` has their functions, and `experiments/` those that
repeat papers or were run by hand. `peers/` has the programs that DIESEL-FS is compared with, and
`probes/` programs that measure themselves in a process of their own. The modules here are shared:
`inputs` (fixed data), `workbench` (folders and rounds), `stored` (a dataset in each form that a
side reads), `reading` (lists of files, read by C and by Python code), `store` (an object store with
a delay and a limited bandwidth), `samples` (alternating runs, medians), `report` (rows and table),
`results` (the page RESULTS.md), `plot`, `running` (a task of some nodes), `client_process` and
`answering` (programs that read on its nodes by orders).

A benchmark is a dictionary of sides, which `alternate` runs in turns, and rows that compare ours
`against` peers with their targets, or with a limit (`no_more_than`). A new one is a function that
returns its rows, and a line in `benchmarks.py`.
"""
