"""Deadlines between clocks that share no origin."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from itertools import pairwise
from unittest import mock

import pytest

pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.lease", reason="up to 0.26.0"
)

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorMetadata

from tests.support.nixl_release import NixlConnectorMetadata

HOUR = 3600.0


@contextmanager
def clock_at(seconds: float) -> Iterator[None]:
    with mock.patch("time.perf_counter", lambda: seconds):
        yield


def metadata(**deadlines: float) -> NixlConnectorMetadata:
    made = NixlConnectorMetadata()
    made.reqs_to_send = dict(deadlines)
    made.reqs_in_batch = {"batched"}
    return made


@pytest.mark.parametrize("there", [0.0, 5 * HOUR, 1e9])
def test_time_left_is_what_arrives(there: float) -> None:
    with clock_at(2 * HOUR):
        sent = pickle.dumps(metadata(soon=2 * HOUR + 1, later=2 * HOUR + 480, late=2 * HOUR - 3))
    with clock_at(there):
        heard = pickle.loads(sent)  # noqa: S301 - our own
    expected = {"soon": there + 1, "later": there + 480, "late": there - 3}
    assert heard.reqs_to_send == pytest.approx(expected)
    assert list(heard.reqs_to_send) == ["soon", "later", "late"], "oldest first, workers rely on it"
    assert heard.reqs_in_batch == {"batched"}


def test_over_several_machines() -> None:
    """Pipeline stages on Ray pass the metadata on."""
    deadline, clocks = 480.0, [0.0, 9 * HOUR, 2 * HOUR]
    carried = metadata(req=deadline)
    for here, there in pairwise(clocks):
        with clock_at(here):
            sent = pickle.dumps(carried)
        with clock_at(there):
            carried = pickle.loads(sent)  # noqa: S301 - our own
    assert carried.reqs_to_send == pytest.approx({"req": clocks[-1] + deadline})


def test_inside_a_multi_connector() -> None:
    with clock_at(0.0):
        sent = pickle.dumps(MultiKVConnectorMetadata(metadata=(metadata(req=480.0),)))
    with clock_at(HOUR):
        [heard] = pickle.loads(sent).metadata  # noqa: S301 - our own
    assert isinstance(heard, NixlConnectorMetadata)
    assert heard.reqs_to_send == {"req": HOUR + 480.0}


def test_sender_keeps_its_own() -> None:
    made = metadata(req=480.0)
    pickle.dumps(made)
    assert made.reqs_to_send == {"req": 480.0}


def test_copy_in_one_process() -> None:
    deadline = time.perf_counter() + 480.0
    assert copy(metadata(req=deadline)).reqs_to_send["req"] == pytest.approx(deadline, abs=1.0)
