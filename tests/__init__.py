"""The tests; `tests.bench` measures instead."""
