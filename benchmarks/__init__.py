"""What is measured, against whom, and how; `results/` holds what was seen."""
