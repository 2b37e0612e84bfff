"""Deployment of DIESEL-FS (README.md), and modules for the Makefile.

They use the project as a user does, by the program `dlcmd`: `demo` is for `make demo`, `docs`
builds the documentation site, and `packages` builds packages.
"""
