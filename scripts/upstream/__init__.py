"""vLLM's releases as they come from the index, or from a clone."""
