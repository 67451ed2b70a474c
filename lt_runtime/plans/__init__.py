"""A layer at run time: strategies, priors (which choose strategies where nothing was measured), plans, their cache."""
