"""The tools. `commands` has one module for each nox session; the packages below it do the work."""

import gc
import signal
import sys

# Code is read here by the million nodes, and imports make more objects than a short run does. To
# look for garbage after each 700 new ones, as Python does, takes a quarter of `nox -s status`.
SELDOM = 20_000

if sys.argv[:1] == ["-m"]:
    # `python -m scripts.commands.apply` imports this before anything else. Until
    # `scripts.system.console.entry` takes over there is nothing to clean up, and Ctrl-C ends the
    # process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.set_threshold(SELDOM)
