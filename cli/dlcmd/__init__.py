"""`dlcmd`, the command line: thin commands over the library `diesel_fs`.

README.md beside this file lists all verbs, options and exit codes. Start reading in `main` (the
table of verbs, and how errors become exit codes), then `options` (global options, types of values),
`addresses` (DATASET@VERSION/path), and the module of a verb. `output` prints results, `progress`
shows how far a verb has come.

The modules of verbs are imported when their verb is used, since each start pays for its imports.
Nothing here imports the server.
"""
