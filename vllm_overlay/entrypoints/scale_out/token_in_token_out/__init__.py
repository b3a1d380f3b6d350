# SPDX-License-Identifier: Apache-2.0
"""Mirrors vllm.entrypoints.scale_out.token_in_token_out."""
