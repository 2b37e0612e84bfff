"""Lets other processes announce to a mount which files they will read, in which order (a *plan*).

A plan arrives over the control socket (`.diesel/control` in the mount) from `Control`, the client
in Python; or the mount itself makes one when a program reads a list of files (`.diesel/filelist`,
`.diesel/shuffle/...`).

First read CONTROL.md and `control.py`, then `control_wire.py` (the fields of plans as bytes),
`control_socket.py` (the socket in the mount's server), `list_plans.py` (plans from lists) and
`commands.py` (how the prefetch worker carries out all plans). Orders themselves are in
`diesel_fs/orders`.
"""
