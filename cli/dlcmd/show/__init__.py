"""The output of all verbs: lines, tables, JSON, progress bars, live views and pages.

Start at `output.py`, through which all results, notes and errors go.
"""
