"""What is true in every process: a request, its life, messages, blocks, batching, configuration, errors, counters."""
