"""What `apply` costs, and what the patched worker costs."""
