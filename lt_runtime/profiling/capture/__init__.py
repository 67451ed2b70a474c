"""Checks whether a function can be captured into a graph, and whether replays give the same results."""
