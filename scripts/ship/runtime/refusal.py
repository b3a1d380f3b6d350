"""How the installer says no: what was found, what was expected, what to do next."""

from __future__ import annotations

# The codes of docs/exit-codes.md, which stand in scripts/system/errors.py.
USAGE = 2
HASH_MISMATCH = 13
BROKEN = 14
WRONG_RELEASE = 15
ALREADY_PATCHED = 16
DIFFERS = 17
STORAGE = 20
CHECK_FAILED = 30


class RefusalError(Exception):
    """The installer ends with `code`; unless the text says otherwise nothing was changed."""

    def __init__(self, code: int, found: str, expected: str, advice: str) -> None:
        super().__init__(found)
        self.code = code
        self.found = found
        self.expected = expected
        self.advice = advice

    def __str__(self) -> str:
        return f"error: {self.found}\nexpected: {self.expected}\nnext: {self.advice}"
