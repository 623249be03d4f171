"""The adapter for Flax Linen, in parts; `manymesh.flax` is its face."""
