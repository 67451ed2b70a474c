"""Optimizers: parameters, their state on the host and on a GPU, rules over groups of parameters, and AdamW."""
