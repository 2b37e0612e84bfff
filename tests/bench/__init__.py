"""Measures DIESEL-FS against its peers and its own limits, in one run: `make bench`.

`benchmarks` is the table of names; the functions are in `cases/`, or in `experiments/` if they
repeat papers. `peers/` runs the programs that DIESEL-FS is compared with, `probes/` are programs
that measure themselves, and the modules here are shared.

A benchmark is a dictionary of sides, which `alternate` runs in turns, and rows that compare ours
`against` peers with their targets, or with a limit (`no_more_than`). A new one is a function that
returns its rows, and a line in `benchmarks.py`.
"""
