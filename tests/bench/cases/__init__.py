"""The benchmarks, by what they measure; `benchmarks.py` has their names."""
