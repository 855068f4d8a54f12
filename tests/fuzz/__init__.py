"""Fuzzing of everything that others send: each module has `fuzz(budget, seed, advance)`; `python -m tests.fuzz` runs it."""
