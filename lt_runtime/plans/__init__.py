"""A layer at run time: strategies, priors, plans, and the cache of plans in memory."""
