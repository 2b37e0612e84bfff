"""The output of all verbs: lines, tables, JSON, progress bars, live views and pages.

Start at `output.py`, through which all results, notes and errors go. Most other modules show one
verb's results; `mount_figures.py` also takes samples of a mount, for `top` and the dashboard.
"""
