"""Small programs as a user would write them; each file's `main` returns the figures that the tests check."""
