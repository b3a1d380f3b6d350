"""The tools: one module per idea, each with one entry that a nox session calls."""

import signal
import sys

if sys.argv[:1] == ["-m"]:
    # `python -m scripts.apply` imports this before anything else. Until `scripts.terminal.entry`
    # takes over there is nothing to clean up, and Ctrl-C ends the process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
