"""The output of all verbs: lines, tables, JSON, progress bars, live views and pages.

Start at `output.py`, through which all results, notes and errors go. `progress.py` shows a verb's
progress, and `drawing.py` draws its bar. The other modules show one verb's results.
`mount_figures.py` also takes samples of a mount, for `top` and the dashboard.
"""
