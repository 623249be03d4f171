"""The adapter for Equinox, in parts; `manymesh.equinox` is its face."""
