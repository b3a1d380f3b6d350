"""The installer's own code: what a `.pyz` of `nox -s apply -- --layer` runs.

It goes into the archive as it stands, and runs wherever vLLM does: nothing but the standard library
of Python 3.10, no import from elsewhere in this repository, and none of vLLM.
"""
