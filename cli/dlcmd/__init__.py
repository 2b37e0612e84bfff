"""`dlcmd`, the command line: thin commands over the library `diesel_fs`.

README.md beside this file lists all verbs, options and exit codes. Start at `main`, then
`args/options` and a verb's module. Nothing here imports the server.
"""
