"""Who joins, steps, pauses and leaves this worker's batch, and running it."""
