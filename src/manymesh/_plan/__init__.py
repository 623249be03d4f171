"""What each submesh does in one call of a step, as data."""
