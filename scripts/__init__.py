"""The tools: one module per idea, each with one entry that a nox session calls."""
