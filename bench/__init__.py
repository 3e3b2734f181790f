"""How fast, measured or simulated."""
