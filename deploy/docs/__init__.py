"""The documentation site: how it is built, and its settings."""
