"""Benchmarks against other libraries; `results/` holds the measurements."""
