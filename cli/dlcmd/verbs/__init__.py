"""The verbs: each is a function in a module, both of its name.

A verb reads its arguments (`../args/`), calls `diesel_fs`, and shows the result (`../show/`). It
decides nothing about datasets itself. `main.py` lists the verbs.
"""
