"""Installs the packages in clean systems of their own; only `make test-packages` runs these."""
