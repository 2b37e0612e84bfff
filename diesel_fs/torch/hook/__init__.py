"""The code that `dlcmd run` puts into the Python processes of a training command.

This folder, the *hook*, is first on their PYTHONPATH, so Python runs `sitecustomize.py` when it
starts. The training environment may have another Python (3.9 or later), other packages, and no
diesel_fs. So the hook needs the standard library only, and may never raise an error into the user's
program. If the hook fails, the script runs on without it, and the launcher (`../planner/`) gets a
note.
"""
