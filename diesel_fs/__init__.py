"""DIESEL-FS: packs datasets of many small files into chunks, and serves them to training jobs."""

__all__ = ["__version__"]

__version__ = "0.1.0"
