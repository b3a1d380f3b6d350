# SPDX-License-Identifier: Apache-2.0
"""Mirrors `vllm.distributed.kv_transfer.kv_connector.v1.nixl`."""
