"""What a user sees: lines, tables, JSON, progress bars, live views and pages.

Start at `output.py`, through which all results, notes and errors go. `progress.py` shows how far a
verb has come, and `drawing.py` draws its bar. The other modules make lines or pages of results:
they are pure, except `mount_figures.py`, which takes samples of a mount.
"""
