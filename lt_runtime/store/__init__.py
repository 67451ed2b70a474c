"""Files on disk: measured plans for each kind of machine, and recordings of the problems that scripts run."""
