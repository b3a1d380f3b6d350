"""Which release the user means."""

from __future__ import annotations

import pytest

from scripts.project import project, supported_release
from scripts.system.errors import UnknownReleaseError


@pytest.mark.parametrize("release", project().releases)
@pytest.mark.parametrize("spelling", ["{}", "v{}", " {} ", "0!{}"])
def test_a_release_in_full(release: str, spelling: str) -> None:
    assert supported_release(spelling.format(release)) == release


def test_a_part_of_a_number_names_its_releases() -> None:
    """To PEP 440 it is the first of them, which nobody means who leaves the rest out."""
    with pytest.raises(UnknownReleaseError, match=r"'0\.20' names 3 vLLM releases") as caught:
        supported_release("0.20")
    assert caught.value.expected == "one of 0.20.0, 0.20.1, 0.20.2"
    with pytest.raises(UnknownReleaseError, match=r"'0\.21' names 1 ") as caught:
        supported_release("0.21")
    assert caught.value.expected == "one of 0.21.0"


@pytest.mark.parametrize("text", ["", "0.2", "0.20.20", "0.20.2.0", "newest", "0.20.2+local", "0"])
def test_no_release(text: str) -> None:
    with pytest.raises(UnknownReleaseError) as caught:
        supported_release(text)
    assert "0.20.2" in caught.value.expected


@pytest.mark.parametrize("text", ["0.34.0", "v0.34"])
def test_a_release_that_is_not_supported_can_be_carried_to(text: str) -> None:
    with pytest.raises(UnknownReleaseError) as caught:
        supported_release(text)
    named = text.removeprefix("v")
    assert f"nox -s lock -- {named}, then: nox -s rebase -- {named}" in caught.value.next_step


@pytest.mark.parametrize("text", ["newest", "0.20", "0.20.2+local", "0.25.0rc1"])
def test_what_cannot_be_pinned_is_not_advised(text: str) -> None:
    with pytest.raises(UnknownReleaseError) as caught:
        supported_release(text)
    assert caught.value.next_step == "give one of these"
