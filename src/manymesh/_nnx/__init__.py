"""The adapter for Flax NNX, in parts; `manymesh.nnx` is its face."""
