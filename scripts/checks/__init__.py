"""What can be said of the code and of the patch set without running vLLM."""
