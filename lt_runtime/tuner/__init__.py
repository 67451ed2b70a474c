"""The tuner: chains of layers, candidates, timing, verification of results, search, and explanations of plans."""
