"""A hook is placed by what it hangs on, and where that is not plain, it is not."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from scripts.carry.hang import hung
from scripts.patchset.patch import read_patch
from tests.scripts.repos import stored_of, write

PATH = "vllm/worker.py"
BASE = textwrap.dedent(
    '''\
    """Work."""
    import os
    from vllm.a import a
    from vllm.b import b

    if os:
        from vllm.c import c


    class Worker(Base):
        """It works."""

        def first(self, request):
            begin(request)
            step(request)
            end(request)

        @staticmethod
        def second(request):
            begin(request)
            end(request)
    '''
)


def swapped(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def put(
    folder: Path,
    change: tuple[str, str],
    *ours: tuple[str, str],
    base: str = BASE,
) -> str:
    """Put the hook that `change` makes of the base into the base with the changes `ours`."""
    name = "1-it/0.20.2.patch"
    made = stored_of(folder / "made", {PATH: base}, {PATH: swapped(base, change)})
    write(folder, {name: made})
    (hunk,) = read_patch(folder / name).files[PATH]
    return hung(base, hunk, swapped(base, *ours))


DECORATED = ("    def first(", "    @hook\n    def first(")
CALLED = ("        step(request)\n", "        step(request)\n        hook(request)\n")
EXCHANGED = ("        step(request)\n", "        hook(request)\n")
BASES = ("class Worker(Base)", "class Worker(Ours, Base)")
IMPORT = ("from vllm.a import a\n", "from vllm.a import a\nfrom ours import hook\n")


def test_a_decorator_hangs_on_the_name_of_its_definition(tmp_path: Path) -> None:
    ours = ("    def first(self, request):\n", "    async def first(self, req, *, more):\n")
    around = ('    """It works."""\n', "    x = 1\n")
    text = put(tmp_path, DECORATED, ours, around)
    assert text == swapped(BASE, (ours[0], "    @hook\n" + ours[1]), around)


def test_a_decorator_stays_where_it_was_among_others(tmp_path: Path) -> None:
    change = ("    @staticmethod\n", "    @staticmethod\n    @hook\n")
    assert put(tmp_path / "1", change, ("second(request)", "second(other)")) == swapped(
        BASE, ("second(request)", "second(other)"), change
    )
    base = swapped(BASE, ("    def first(", "    @another\n    def first("))
    change = ("    @another\n", "    @hook\n    @another\n")
    left_out = ("    @another\n", "")
    text = put(tmp_path / "2", change, left_out, base=base)
    assert text == swapped(base, ("    @another\n", "    @hook\n"))
    assert put(tmp_path / "3", change, ("    @another\n", "    @property\n"), base=base) == ""


@pytest.mark.parametrize(
    "ours",
    [
        ("    def first(", "    def renamed("),
        ("    @staticmethod\n", "    def first(self):\n        pass\n\n    @staticmethod\n"),
        ("class Worker(Base)", "class Other(Base)"),
    ],
)
@pytest.mark.parametrize("change", [DECORATED, EXCHANGED, CALLED])
def test_what_is_not_there_once_under_its_name_has_no_place(
    change: tuple[str, str], ours: tuple[str, str], tmp_path: Path
) -> None:
    assert put(tmp_path, change, ours) == ""


def test_a_class_gets_its_further_base(tmp_path: Path) -> None:
    around = ('"""It works."""', '"""It works more."""')
    assert put(tmp_path / "1", BASES, around) == swapped(BASE, around, BASES)
    both = swapped(BASE, ("(Base)", "(Left, Base)"))
    text = put(tmp_path / "2", ("(Left, Base)", "(Ours, Left, Base)"), ("Left, ", ""), base=both)
    assert text == swapped(BASE, BASES)
    assert put(tmp_path / "3", BASES, ("(Base)", "(Other)")) == ""
    assert put(tmp_path / "4", BASES, ("(Base)", "(Base, Protocol)")) == ""
    assert put(tmp_path / "5", BASES, ("(Base)", "(Base, metaclass=M)")) == ""


def test_lines_are_exchanged_wherever_they_stand_in_their_definition(tmp_path: Path) -> None:
    deeper = ("        step(request)\n", "        if request:\n            step(request)\n")
    text = put(tmp_path / "1", EXCHANGED, deeper)
    assert text == swapped(BASE, (deeper[0], deeper[1].replace("step", "hook")))
    twice = ("        begin(request)\n        step", "        step(request)\n        step")
    assert put(tmp_path / "2", EXCHANGED, twice) == ""
    assert put(tmp_path / "3", EXCHANGED, ("step(request)", "step(other)")) == ""


def test_a_call_stands_beside_the_line_that_is_left_of_two(tmp_path: Path) -> None:
    end = ("        step(request)\n        end(request)", "        step(request)\n        halt()")
    assert put(tmp_path / "1", CALLED, end) == swapped(
        BASE, (end[0], "        step(request)\n        hook(request)\n        halt()")
    )
    step = ("        step(request)\n", "        with it:\n            go()\n")
    assert put(tmp_path / "2", CALLED, step) == swapped(
        BASE, (step[0], step[1] + "        hook(request)\n")
    )
    # Before or behind what has come between them? A person knows.
    between = ("        step(request)\n", "        step(request)\n        more()\n")
    assert put(tmp_path / "3", CALLED, between) == ""
    both = ("step(request)\n        end(request)", "halt()\n        finish()")
    assert put(tmp_path / "4", CALLED, both) == ""


def test_an_import_goes_behind_the_one_before_it_or_the_last(tmp_path: Path) -> None:
    moved = ("from vllm.a import a\nfrom vllm.b import b\n", "from vllm.b import (\n    b,\n)\n")
    text = put(tmp_path / "1", IMPORT, moved)
    assert text == swapped(BASE, ("import os\n", "import os\nfrom ours import hook\n"), moved)
    none = ("import os\nfrom vllm.a import a\nfrom vllm.b import b\n", "from vllm.d import d\n")
    assert put(tmp_path / "2", IMPORT, none) == swapped(
        BASE, (none[0], "from vllm.d import d\nfrom ours import hook\n")
    )


def test_names_are_added_to_an_import_or_make_one(tmp_path: Path) -> None:
    base = swapped(BASE, ("from vllm.b", "from ours import (\n    one,\n)\nfrom vllm.b"))
    change = ("    one,\n", "    one,\n    two,\n    three,\n")
    more = ("    one,\n", "    one,\n    four,\n")
    text = put(tmp_path / "1", change, more, base=base)
    assert text == swapped(base, ("    one,\n", "    one,\n    four,\n    two,\n    three,\n"))
    left_out = ("from ours import (\n    one,\n)\n", "")
    text = put(tmp_path / "2", change, left_out, base=base)
    assert text == swapped(base, (left_out[0], "from ours import two, three\n"))
    single = (left_out[0], "from ours import one\n")
    text = put(tmp_path / "3", change, single, base=base)
    assert text == swapped(base, (left_out[0], "from ours import one, two, three\n"))


def test_no_hook_is_placed_in_what_is_no_python(tmp_path: Path) -> None:
    for n, change in enumerate((IMPORT, DECORATED, BASES, EXCHANGED, CALLED)):
        assert put(tmp_path / str(n), change, ("class Worker", "<<<<<<< class Worker")) == ""
