"""The tools. `commands` has one module for each nox session; the packages below it do the work."""

import signal
import sys

if sys.argv[:1] == ["-m"]:
    # `python -m scripts.commands.apply` imports this before anything else. Until
    # `scripts.system.console.entry` takes over there is nothing to clean up, and Ctrl-C ends the
    # process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
