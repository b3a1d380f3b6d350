"""The registry of fixes, their patches, and what they make of upstream's files."""
