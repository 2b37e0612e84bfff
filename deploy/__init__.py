"""Deployment of DIESEL-FS (README.md), and modules for the Makefile.

`demo` is for `make demo`; `docs` builds the documentation site; `packages` builds packages;
`torchvision_operators` makes torchvision importable. They use the project as a user does, by the
program `dlcmd`.
"""
