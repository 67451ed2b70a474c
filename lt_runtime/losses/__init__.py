"""Losses, each with its gradient."""
