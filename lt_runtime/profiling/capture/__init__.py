"""Whether a function can be captured, and what a replay of it would get wrong."""
