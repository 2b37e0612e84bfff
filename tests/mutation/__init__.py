"""Mutation runs: they measure how many small faults in the code the tests find.

A mutant is the code with one line changed. A test kills it by failing. `python -m
tests.mutation` draws mutants (`mutants.py`), finds the tests that reach a line
(`coverage_map.py`), and runs those tests on each mutant (`verdicts.py`), in a private copy of
the tree (`sandbox.py`).

mutmut and cosmic-ray were considered: the first rewrites every function into a trampoline beside
its variants, and the second edits the tree in place and runs one command, here an hour, per
mutant. Neither follows a line into the daemons that a test starts, nor ends those and their
mounts.
"""
