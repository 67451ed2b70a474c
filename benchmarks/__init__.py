"""Benchmarks of lt_runtime against other libraries; the folder `results/` holds the measurements."""
