"""What `nox -s` runs: one module for each session, of its name.

They read arguments and print; nothing imports them.
"""
