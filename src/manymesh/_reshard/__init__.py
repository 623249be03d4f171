"""Moving values between submeshes without going through the host."""
