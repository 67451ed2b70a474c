"""A layer at run time: strategies, priors, plans, bound calls, and the plans in memory."""
