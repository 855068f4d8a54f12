"""Fuzzing of what others send: each module has `fuzz(budget, seed, advance)`, and `python -m tests.fuzz` runs it."""
