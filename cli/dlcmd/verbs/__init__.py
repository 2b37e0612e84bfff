"""The verbs: each is a module of its name, which has a function of its name.

A verb reads its arguments (`../args/`), calls `diesel_fs`, and shows the result (`../show/`); it
decides nothing about datasets itself. `main.py` lists the verbs.
"""
