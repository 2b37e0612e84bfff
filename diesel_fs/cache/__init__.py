"""Bytes of chunks near the reader: what is kept in memory, and for how long."""
