"""Which prompt chunks run next on this worker, and running them."""
