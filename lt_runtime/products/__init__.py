"""One matrix product as a plan: the library's, a narrow one, one on padded copies, one with a pass."""
