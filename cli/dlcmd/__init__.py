"""`dlcmd`, the command line: thin commands over the library `diesel_fs`.

README.md beside this file lists all verbs, options and exit codes. Start at `main` (the table of
verbs, and how errors become exit codes), then `args/options`, `args/addresses`
(DATASET@VERSION/path), and a verb's module. A verb's module is imported when the verb is used,
since each start pays for its imports. Nothing here imports the server.
"""
