"""Saving pytrees of arrays on any submeshes, and restoring them onto any others."""
