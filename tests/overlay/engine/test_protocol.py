"""Engine clients that cannot tell a prefill server: they say so once, and go on working."""

from __future__ import annotations

import asyncio

import pytest

from vllm_overlay.engine.protocol import KVTransferNotifier


def test_a_client_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    class First(KVTransferNotifier):
        pass

    class Second(KVTransferNotifier):
        pass

    for client in (First(), First(), Second(), First(), Second()):
        asyncio.run(client.notify_kv_transfer_request_rejected("r", {}))
    said = [r.getMessage() for r in caplog.records if "cannot tell" in r.getMessage()]
    assert [message.split()[0] for message in said] == ["First", "Second"]


def test_every_engine_client_of_the_release_can_be_asked() -> None:
    from vllm.engine.protocol import EngineClient
    from vllm.v1.engine.async_llm import AsyncLLM

    theirs = EngineClient.notify_kv_transfer_request_rejected
    assert theirs is KVTransferNotifier.notify_kv_transfer_request_rejected
    assert not getattr(theirs, "__isabstractmethod__", False)
    assert AsyncLLM.notify_kv_transfer_request_rejected is not theirs
