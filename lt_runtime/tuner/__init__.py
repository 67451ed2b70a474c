"""What measures: candidates, timing, verification, search, explanation."""
