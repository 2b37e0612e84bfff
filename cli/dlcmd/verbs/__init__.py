"""The verbs: each is a module of its name, which has a function of its name.

`main.py` lists them in `VERBS`, and imports a module only when its verb is used. A verb reads its
arguments (`../args/`), calls `diesel_fs`, and shows the result (`../show/`); it decides nothing
about datasets itself.
"""
