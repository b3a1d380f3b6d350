# SPDX-License-Identifier: Apache-2.0
"""Mirrors vllm.entrypoints.serve.disagg."""
