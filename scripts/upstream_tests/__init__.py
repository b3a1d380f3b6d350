"""Upstream's own tests, and later releases' for our fixes, on stock against patched."""
