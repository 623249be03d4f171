"""Stacked values whose layers lie on several submeshes: one block for each, from the arguments to the results."""
