"""Planted faults, and a runner that tells which of them the tests see: `python -m tests.mutants`."""
