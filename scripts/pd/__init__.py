"""A real P/D deployment on this machine's CPU, stock and patched."""
