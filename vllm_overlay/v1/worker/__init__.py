# SPDX-License-Identifier: Apache-2.0
"""Mirrors vllm.v1.worker."""
