# SPDX-License-Identifier: Apache-2.0
"""Up to 0.30.0: a request that wants something of each prompt token loads none of them.

Its log-probabilities come from computing the prompt. Of tokens whose KV was received the model
runner has none, and answers with what its buffer held before. From 0.31.0 on upstream's scheduler
says so, to every connector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


def may_load(request: Request) -> bool:
    """Whether KV from elsewhere, as from the prefix cache, serves the request."""
    return not request.skip_reading_prefix_cache
