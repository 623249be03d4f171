"""Generated programs: what users write, drawn by Hypothesis, and the laws that hold for all of it."""
