"""Who gets which request: HTTP front, tokenizing, queue, admission, routing, registry, launcher, command line."""
