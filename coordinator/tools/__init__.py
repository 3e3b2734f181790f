"""Functions that a model may call: how they are told to it, and how its calls are read."""
