"""Measures DIESEL-FS against its peers and its own limits, in one run: `make bench`.

`cases/` holds what is measured, `peers/` those we are measured against, `probes/` programs that
measure themselves in a process of their own. The rest is the apparatus: `inputs` (fixed data),
`workbench` (folders and rounds), `epochs` (orders, read by `reader.c` and checked), `samples`
(alternating runs, medians), `report` (rows and table), `plot`.
A new benchmark is a function that returns rows, and a line in `cases/__init__.py`.
"""
