"""Files for running DIESEL-FS for others (README.md), and for the Makefile: system packages, the
demo.

`demo` is what `make demo` runs; `images` draws its images; `docs` builds the documentation site;
`torchvision_operators` makes torchvision importable. They use the project as a user does: by the
program `dlcmd`.
"""
