"""Code of a user's, for a type checker alone: nothing imports it."""
