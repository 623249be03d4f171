"""Sums over the batch that stay unreduced until the end of a microbatch loop."""
