"""Several processes: starting them, finding each other, agreeing, and ending together."""
