"""The functions of the benchmarks; `benchmarks.py` has their names."""
