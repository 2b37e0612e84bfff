"""The code that `dlcmd run` puts into the Python processes of a training command.

This folder is first on their PYTHONPATH, so Python runs `sitecustomize.py` when it starts. The
training environment has another Python (3.9 or later), other packages, and no diesel_fs. So
everything here needs the standard library only, and may never raise an error into the user's
program. If the hook fails, the script runs on as if it were not there, and the launcher
(`../planner/`) gets a note.
"""
