"""The folder that one side of the benchmark `rank-balance` has in its PYTHONPATH; Python imports
its `sitecustomize.py` at the start of each program.
"""
