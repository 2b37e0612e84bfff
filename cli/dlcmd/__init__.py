"""`dlcmd`, the command line: thin commands over the library."""
