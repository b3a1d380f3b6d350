"""Of a message stays what the code decides, and goes what chance and the machine decide."""

from __future__ import annotations

import tempfile

import pytest

from scripts.project import ROOT
from scripts.prove.chance import scrubbed, without_chance
from scripts.prove.outcomes import Outcome


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("['f566a43f-36...9f189bf58807'] == []", "['ceeebaf1-d0...5f481549a9e8'] == []"),
        ("'85b4a45a3c05...0f7146601fbd5'", "'f71ca9d78379...deddd5217eea1'"),
        ("{'0_cmpl-bc51...1-0-929ccb54'}", "{'0_cmpl-93b8...f-0-01234567'}"),
        (
            "engine 9d2f0c1e-63a9-4d0a-8b5e-0a1b2c3d4e5f",
            "engine 00000000-0000-4000-8000-000000000000",
        ),
        ("<object at 0x7f00deadbeef>", "<object at 0x55aa1>"),
        ("connect to 127.0.0.1:40001", "connect to 127.0.0.1:5600"),
        ("tcp://localhost:40001", "tcp://localhost:5600"),
        ("took 0.123456 s", "took 12.98765432 s"),
        ("took 1e-07 s", "took 2.5e-06 s"),
        ("pid 17", "pid 12345"),
        ("no file /tmp/pytest-of-a/pytest-1/x0/config.json", "no file /tmp/kvfix-model-ab_c/y"),
        (f"no file {tempfile.gettempdir()}/a/b", "no file /tmp/c"),
        (f"{ROOT}/tests/a.py", "tests/a.py"),
    ],
)
def test_what_chance_and_the_machine_decide_goes(one: str, other: str) -> None:
    assert scrubbed(one) == scrubbed(other)


@pytest.mark.parametrize(
    "text",
    [
        "AssertionError: assert [] == [{'do_remote_...gine-p', ...}]",
        "AssertionError: assert {} == {'bad': (0, 40)}",
        "AssertionError: assert [{'req-d': (3...d': (40, 41)}] == []",
        "AssertionError: assert [[], [b'req-p... [b'req-p:1']]",
        "AssertionError: assert ['post_proces...v_on_receive'] == []",
        "AssertionError: the engine dies of UnicodeDecodeError('utf-8', b'\\xff\\xfe:1', 0, 1)",
        "AssertionError: assert {(18, 1): ['g...holds 293.0']} == {}",
        "AssertionError: assert Counter({'cmpl-p-0': 16}) == {'cmpl-p-0': 1}",
        "HTTP 404 for /v1/completions: 'decoded' is 65536, not 2048.5",
        "AssertionError: assert '-prefix-caching' in ''",
    ],
)
def test_what_the_code_decides_stays(text: str) -> None:
    assert scrubbed(text) == text


def test_an_outcome_keeps_its_result() -> None:
    seen = Outcome("failed", f"{ROOT}/tests/a.py:3", "assert '0123456789ab' == ''")
    assert without_chance(seen) == Outcome("failed", "tests/a.py:3", "assert '<id>' == ''")
