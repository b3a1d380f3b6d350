"""The difference alone: as an installer for an environment, and as a layer for an image."""
