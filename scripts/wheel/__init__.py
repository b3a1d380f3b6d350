"""Wheels: read, planned, written and checked, member by member."""
