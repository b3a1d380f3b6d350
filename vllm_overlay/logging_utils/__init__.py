# SPDX-License-Identifier: Apache-2.0
"""Mirrors vllm.logging_utils."""
