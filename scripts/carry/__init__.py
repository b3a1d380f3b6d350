"""The fixes carried to another release: merged, tried, proven in a copy, landed."""
