"""User code that only a type checker reads; no test imports it."""
