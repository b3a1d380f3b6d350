# SPDX-License-Identifier: Apache-2.0
"""0.24.0 to 0.24.0: the name that later releases have for what a scheduler counts."""

from __future__ import annotations

from typing import Protocol


class _Counts(Protocol):
    def _mamba_prefill_token_count(self, num_prompt_tokens: int) -> int: ...


class NamesRemotePrefill:
    """A base for `NixlBaseConnectorScheduler`: 0.25.0 renamed the method, and no more of it."""

    def _get_remote_prefill_token_count(self: _Counts, num_prompt_tokens: int) -> int:
        """Return how many of a prompt's tokens P computes and D reads."""
        return self._mamba_prefill_token_count(num_prompt_tokens)
