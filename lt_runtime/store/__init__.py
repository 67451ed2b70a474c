"""What is remembered on disk: measured plans for each machine, and the problems that a script has met."""
