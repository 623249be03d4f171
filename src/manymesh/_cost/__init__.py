"""What a step costs, from its plan alone: pure data. Nothing here compiles, and nothing touches a device."""
