"""The folder in the PYTHONPATH of one side of the benchmark `rank-balance`."""
