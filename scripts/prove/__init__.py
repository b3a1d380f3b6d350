"""What tests show of each fix on each release: environments, runs and records."""
