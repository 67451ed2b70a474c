"""What is remembered on disk: problems' keys, entries, the document, the machine that it is of."""
