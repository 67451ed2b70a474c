"""What measures: chains of layers, candidates, timing, verification, search, explanation."""
