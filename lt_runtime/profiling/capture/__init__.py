"""`check_capture`: whether a function can be captured into a CUDA graph, and whether replays give the same results."""
