"""Hunks whose place is another one now: definitions that have moved, imports, and collisions."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from scripts.carry.merge import How, Status
from tests.scripts.carry.test_merge import (
    BASE,
    FIXED,
    METHOD,
    PATH,
    REST,
    SPLIT,
    a_patch,
    carried,
    carried_to,
    swapped,
)

THERE = "vllm/a/base.py"
HOOKED = ("        go_on()\n", "        hook(self)\n")
OURS = "from ours import hook\n"
IMPORT = ("import two\n", f"import two\n{OURS}")
IMPORT_THERE = ("import base\n", f"import base\n{OURS}")


# ---------------------------------------------------------------- definitions that have moved


@pytest.mark.parametrize(
    ("fix", "since"),
    [
        # Placed by merging alone: both lines that it stands between are there.
        (
            (
                "        begin()\n        go_on()\n",
                "        begin()\n        hook(self)\n        go_on()\n",
            ),
            ("        end()\n", "        end()\n        more()\n"),
        ),
        # Placed by the line that it stands for: what is next to that has changed.
        (HOOKED, ("        begin()\n", "        begin(self)\n")),
    ],
)
def test_what_a_definition_has_become_where_it_went_is_kept(
    fix: tuple[str, str], since: tuple[str, str], tmp_path: Path
) -> None:
    after = swapped(BASE, IMPORT, fix)
    one = carried(tmp_path, {PATH: REST, THERE: swapped(SPLIT, since)}, after=after)
    assert one.status is Status.MERGED
    assert one.texts == {THERE: swapped(SPLIT, IMPORT_THERE, fix, since)}


def test_changes_in_one_definition_move_together(tmp_path: Path) -> None:
    pairs = (("        go_on()\n", "        go()\n"), ("        end()\n", "        stop()\n"))
    after = BASE.replace(METHOD, swapped(METHOD, *pairs))
    one = carried(tmp_path, {PATH: REST, THERE: SPLIT}, after=after)
    assert one.texts == {THERE: swapped(SPLIT, *pairs)}


def test_a_hunk_of_two_definitions_does_not_follow_one_of_them(tmp_path: Path) -> None:
    tail = BASE[BASE.index(METHOD) :]
    fixed = swapped(
        tail,
        ("        go_on()\n", "        go()\n"),
        ("        end()\n\n", "        stop()\n\n"),
        ("third(self):\n        begin()\n", "third(self):\n        start()\n"),
    )
    there = f"{SPLIT}\n{tail.removeprefix(METHOD)}"
    one = carried(
        tmp_path, {PATH: BASE.replace(tail, ""), THERE: there}, after=BASE.replace(tail, fixed)
    )
    assert [(hunk.how, hunk.into) for hunk in one.hunks] == [(How.GONE, "")]


def test_a_function_that_has_moved_is_followed_to_its_new_neighbours(tmp_path: Path) -> None:
    work = "def work():\n    begin()\n    go_on()\n    end()\n"
    before = f"import os\n\n\n{work}\n\ndef rest():\n    pass\n"
    there = f"import os\n\n\ndef other():\n    begin()\n    go_on()\n\n\n{work}"
    fix = (
        "    begin()\n    go_on()\n    end()\n",
        "    begin()\n    hook()\n    go_on()\n    end()\n",
    )
    one = carried(
        tmp_path,
        {PATH: before.replace(f"{work}\n\n", ""), THERE: there},
        before=before,
        after=swapped(before, fix),
    )
    assert [hunk.said for hunk in one.hunks] == [f"in {THERE}, work now"]
    assert one.texts == {THERE: swapped(there, fix)}


def test_a_definition_that_the_fix_renames_is_renamed_where_it_went(tmp_path: Path) -> None:
    renamed = ("    def second(self):\n", "    def second_of_all(self):\n")
    one = carried(tmp_path, {PATH: REST, THERE: SPLIT}, after=swapped(BASE, renamed))
    assert one.status is Status.MERGED
    assert one.texts == {THERE: swapped(SPLIT, renamed)}


def test_what_is_put_behind_a_definition_does_not_follow_it(tmp_path: Path) -> None:
    """Of two functions that end alike, it cannot be seen in the lines which one is new."""
    body = "    a()\n    b()\n    c()\n\n\n"
    before = f"def f():\n{body}x = 1\ny = 2\nz = 3\n"
    one = carried(
        tmp_path,
        {THERE: f"import os\n\n\ndef f():\n{body}"},
        before=before,
        after=before.replace("x = 1\n", f"def g():\n{body}x = 1\n"),
    )
    assert one.status is Status.GONE
    assert one.texts == {}


# However a name is indented.
@pytest.mark.parametrize("call", ["        hook(self)\n", "        go_on(\nhook)\n"])
def test_only_the_imports_that_it_names_go_with_what_has_moved(call: str, tmp_path: Path) -> None:
    after = swapped(
        BASE.removesuffix("        end()\n") + "        rest(self)\n",
        ("import two\n", f"import two\n{OURS}from ours import rest\n"),
        ("        go_on()\n", call),
    )
    one = carried(tmp_path, {PATH: REST, THERE: SPLIT}, after=after)
    assert one.status is Status.MERGED
    assert one.texts[THERE] == swapped(SPLIT, IMPORT_THERE, ("        go_on()\n", call))
    assert f"{OURS}from ours import rest\n" in one.texts[PATH]


def test_imports_stay_for_what_has_moved_within_the_module(tmp_path: Path) -> None:
    base = f"class Base:\n{METHOD}".rstrip("\n") + "\n"
    one = carried(tmp_path, {PATH: f"{REST}\n\n{base}"})
    assert one.status is Status.MERGED
    assert "gone with what uses them" not in one.hunks[0].said
    assert one.hunks[1].said == f"in {PATH}, Base.second now"
    assert one.texts[PATH].endswith(base.replace(*HOOKED))
    assert OURS in one.texts[PATH]


def test_a_fix_of_imports_alone_leaves_nothing_behind(tmp_path: Path) -> None:
    after = swapped(BASE, IMPORT)
    one = carried(tmp_path, {PATH: BASE}, after=after)
    assert one.status is Status.CARRIED
    assert one.texts == {PATH: after}


def test_imports_that_nothing_needs_any_more_are_proposed_nowhere(tmp_path: Path) -> None:
    """The file is gone; most of it is one module now, and what uses the import is another."""
    one = carried(tmp_path, {"vllm/a/most.py": REST, THERE: SPLIT})
    assert one.status is Status.MERGED
    assert [hunk.went for hunk in one.hunks] == [(), ()]
    assert one.texts == {THERE: swapped(SPLIT, IMPORT_THERE, HOOKED)}


@pytest.mark.parametrize("now", [None, f"<<<<<<< vLLM 2\n{SPLIT}"])
def test_what_cannot_be_read_where_it_went_needs_a_person(now: str | None, tmp_path: Path) -> None:
    """The release has the place; what is installed has not, or an earlier fix collided in it."""
    files = {PATH: REST} if now is None else {PATH: REST, THERE: now}
    one = carried_to(
        tmp_path / "target", a_patch(tmp_path / "source"), {PATH: REST, THERE: SPLIT}, now=files
    )
    assert [hunk.how for hunk in one.hunks] == [How.EXACT, How.GONE]
    assert one.hunks[1].went[0].path == THERE
    assert "proposed" not in one.hunks[1].said
    assert THERE not in one.texts


def test_another_name_is_no_proposal_though_the_code_is_the_same(tmp_path: Path) -> None:
    more = "".join(f"        more({n})\n" for n in range(9))
    there = f"{swapped(SPLIT, ('def second', 'def renamed'))}\n    def more(self):\n{more}"
    one = carried(tmp_path, {PATH: REST, THERE: there})
    assert one.hunks[1].how is How.GONE
    assert (one.hunks[1].went[0].path, one.hunks[1].went[0].name) == (THERE, "Base.renamed")
    assert THERE not in one.texts


def test_a_module_that_may_be_either_of_two_is_proposed_in_the_first(tmp_path: Path) -> None:
    one = carried(tmp_path, {"vllm/core.py": BASE, "vllm/other.py": BASE})
    assert [hunk.said.partition("; ")[2] for hunk in one.hunks] == [
        "proposed in vllm/core.py, ",
        "proposed in vllm/core.py, Worker.second",
    ]
    assert one.texts == {"vllm/core.py": FIXED}


# ---------------------------------------------------------------- imports


IMPORTS = textwrap.dedent(
    """\
    import os
    from vllm import one
    from vllm import two
    from vllm import three
    from vllm import four
    from vllm import five


    def work():
        pass
    """
)
ADDED = ("import three\n", f"import three\n{OURS}")


@pytest.mark.parametrize(
    ("ours", "placed"),
    [
        # The line above it is left, and of those below it the next but one.
        (("import four", "import vier"), f"import three\n{OURS}from vllm import vier"),
        # The line below it is.
        (("import three", "import drei"), f"import drei\n{OURS}from vllm import four"),
        # Neither is; then it is what is nearest.
        (
            ("three\nfrom vllm import four", "drei\nfrom vllm import vier"),
            f"import two\n{OURS}from vllm import drei",
        ),
        (
            ("two\nfrom vllm import three\nfrom vllm import four", "zwei\nfrom vllm import drei"),
            f"import drei\n{OURS}from vllm import five",
        ),
    ],
)
def test_an_import_goes_beside_the_nearest_line_that_is_left(
    ours: tuple[str, str], placed: str, tmp_path: Path
) -> None:
    one = carried(
        tmp_path, {PATH: swapped(IMPORTS, ours)}, before=IMPORTS, after=swapped(IMPORTS, ADDED)
    )
    assert [(hunk.how, hunk.said) for hunk in one.hunks] == [
        (How.MERGED, "an import, beside the same line")
    ]
    text = one.texts[PATH]
    assert placed in text
    assert text.replace(OURS, "") == swapped(IMPORTS, ours)


PARENTHESES = "from vllm.all import (\n    two,\n)\n"
WORK = "\n\ndef work():\n    pass\n"
STOP = "class Stop(Exception): ...\n"


# In each text ">" is where the import stands.
@pytest.mark.parametrize(
    ("before", "ours", "made"),
    [
        # Within the parentheses of another import it is none.
        (
            f"{PARENTHESES}>from vllm import three\nfrom vllm import four\n{WORK}",
            f"{PARENTHESES[:-1]}  # all\nfrom vllm import drei\nfrom vllm import four\n{WORK}",
            f"{PARENTHESES[:-1]}  # all\nfrom vllm import drei\n>from vllm import four\n{WORK}",
        ),
        # A line without text is nobody's neighbour.
        (
            "X = 0\n\nfrom vllm import two\nfrom vllm import three\n>\nY = 1\nZ = 2\n",
            "X = 0\n\nfrom vllm import two\nfrom vllm import drei\nY = 1\nZ = 2\n",
            "X = 0\n\nfrom vllm import two\n>from vllm import drei\nY = 1\nZ = 2\n",
        ),
        # Below a definition what is in it may not find the name yet.
        (
            f"from vllm import one\n{STOP}>from vllm import three\n{WORK}",
            f"from vllm import one\n{STOP}from vllm import drei\n{WORK}",
            f"from vllm import one\n>{STOP}from vllm import drei\n{WORK}",
        ),
        (
            f"from vllm import two\n>from vllm import three\n{WORK}",
            f"from vllm import zwei\nfrom vllm import drei\n{WORK}\nfrom vllm import two\nX = 0\n",
            f"from vllm import zwei\nfrom vllm import drei\n>{WORK}\nfrom vllm import two\nX = 0\n",
        ),
    ],
)
def test_an_import_goes_only_where_it_is_one_for_all_of_the_module(
    before: str, ours: str, made: str, tmp_path: Path
) -> None:
    one = carried(
        tmp_path,
        {PATH: ours},
        before=before.replace(">", ""),
        after=before.replace(">", OURS),
    )
    assert one.status is Status.MERGED
    assert one.texts == {PATH: made.replace(">", OURS)}


def test_imports_that_stand_together_stay_together(tmp_path: Path) -> None:
    ours = swapped(IMPORTS, ("import three", "import drei"), ("import four", "import vier"))
    after = swapped(IMPORTS, ("import three\n", f"import three\n{OURS}import more\n"))
    one = carried(tmp_path, {PATH: ours}, before=IMPORTS, after=after)
    assert [hunk.said for hunk in one.hunks] == ["an import, beside the same line"]
    assert f"import two\n{OURS}import more\nfrom vllm import drei\n" in one.texts[PATH]


def test_a_name_goes_into_the_parentheses_that_it_stood_in(tmp_path: Path) -> None:
    before = swapped(IMPORTS, ("from vllm import two\n", PARENTHESES))
    change, ours = (
        ("    two,\n", "    two,\n    hook,\n"),
        ("    two,\n)", "    two,\n    three,\n)"),
    )
    one = carried(
        tmp_path, {PATH: swapped(before, ours)}, before=before, after=swapped(before, change)
    )
    assert [hunk.said for hunk in one.hunks] == ["placed by what it hangs on"]
    assert "(\n    two,\n    three,\n    hook,\n)\n" in one.texts[PATH]


@pytest.mark.parametrize(
    "change",
    [
        ("from vllm import three\n", OURS),  # in place of another
        ("import three\n", "import three\nLIMIT = 1\n"),
        ("import three\n", f"import three\n{OURS}LIMIT = hook\n"),
    ],
)
def test_what_is_more_than_a_further_import_collides(
    change: tuple[str, str], tmp_path: Path
) -> None:
    ours = swapped(IMPORTS, ("import three", "import drei"), ("import four", "import vier"))
    one = carried(tmp_path, {PATH: ours}, before=IMPORTS, after=swapped(IMPORTS, change))
    assert one.status is Status.CONFLICT
    assert "<<<<<<< vLLM 2\nfrom vllm import drei\n" in one.texts[PATH]


# ---------------------------------------------------------------- collisions


@pytest.mark.parametrize(
    ("fix", "ours", "said"),
    [
        (HOOKED, ("        go_on()\n", "        go_further()\n"), "        go_further()"),
        (HOOKED, ("        go_on()\n", ""), "(nothing)"),
        (
            ("        go_on()\n        halt()\n", "        hook(self)\n"),
            ("        go_on()\n        halt()\n", "        go_further()\n        stop()\n"),
            "        go_further()\n        stop()",
        ),
        # What merges above it is no part of it.
        (
            (
                "second(self):\n        begin()\n        go_on()\n",
                "second(self, x):\n        begin()\n        hook(x)\n",
            ),
            ("        go_on()\n", "        go_further()\n"),
            "        go_further()",
        ),
        # Nor are the markers of an earlier one.
        (
            HOOKED,
            (
                "        go_on()\n",
                "<<<<<<< vLLM 2\n        go_further()\n||||||| here\n=======\n>>>>>>> there\n",
            ),
            "        go_further()",
        ),
    ],
)
def test_a_collision_says_what_the_release_has_there(
    fix: tuple[str, str], ours: tuple[str, str], said: str, tmp_path: Path
) -> None:
    release = BASE.replace(METHOD, swapped(METHOD, ours))
    after = BASE.replace(METHOD, swapped(METHOD, fix))
    one = carried(tmp_path, {PATH: release}, after=after)
    assert [hunk.how for hunk in one.hunks] == [How.CONFLICT]
    marked = enumerate(one.texts[PATH].splitlines(), start=1)
    line = max(number for number, line in marked if line == "<<<<<<< vLLM 2")
    assert one.hunks[0].said == f"line {line}:\n{said}"


def test_what_belongs_to_no_definition_collides_and_is_not_gone(tmp_path: Path) -> None:
    before = f"LIMIT = 1\n{BASE}"
    one = carried(
        tmp_path,
        {PATH: f"LIMIT = 2\n{BASE}"},
        before=before,
        after=f"LIMIT = 3\n{BASE}",
    )
    assert [(hunk.how, hunk.definition, hunk.said) for hunk in one.hunks] == [
        (How.CONFLICT, "", "line 1:\nLIMIT = 2")
    ]


def test_below_a_collision_nothing_is_said_to_be_gone(tmp_path: Path) -> None:
    pairs = (
        ("        step_one()\n", "        {}_one()\n"),
        ("        other()\n", "        {}()\n"),
    )
    after, ours = (
        swapped(BASE, *((old, new.format(word)) for old, new in pairs))
        for word in ("ours", "their")
    )
    one = carried(tmp_path, {PATH: ours}, after=after)
    assert [(hunk.how, hunk.definition) for hunk in one.hunks] == [
        (How.CONFLICT, "Worker.first"),
        (How.CONFLICT, "Worker.third"),
    ]


LINERS = "".join(f"def work{n}(): ...\n" for n in range(9))


@pytest.mark.parametrize(
    ("after", "definition"),
    [
        (f"{LINERS}X = 1\n", ""),  # what is put there is part of none
        (LINERS.removesuffix("def work8(): ...\n"), "work8"),
        (LINERS.removesuffix("def work7(): ...\ndef work8(): ...\n"), "work7"),
    ],
)
def test_at_the_end_of_a_module_a_hunk_changes_what_ends_there(
    after: str, definition: str, tmp_path: Path
) -> None:
    one = carried(tmp_path, {PATH: LINERS}, before=LINERS, after=after)
    assert one.status is Status.CARRIED
    assert [hunk.definition for hunk in one.hunks] == [definition]


# ---------------------------------------------------------------- conflicts that two hunks are in


STEPS = "def f():\n" + "".join(f"    step_{n}()\n" for n in range(20))
BOTH = swapped(STEPS, ("step_4", "hook_4"), ("step_14", "hook_14"))


def sides(text: str) -> list[str]:
    """What stands in front of the one conflict, the release's side, the base, ours, the rest."""
    parts = re.split(r"^(?:<<<<<<< .*|\|{7} .*|=======|>>>>>>> .*)\n", text, flags=re.MULTILINE)
    assert len(parts) == 5
    return parts


@pytest.mark.parametrize("first", ["", "import one\nimport two\n\n\n"])
@pytest.mark.parametrize("rest", ["", "\n\ndef g():\n    hook()\n"])
def test_a_hunk_in_the_conflict_of_an_earlier_one_is_on_the_side_of_the_patch(
    first: str, rest: str, tmp_path: Path
) -> None:
    """Who takes that side has both."""
    theirs, before, after = (
        f"{first}{text}{rest}" for text in (STEPS.replace("step", "other"), STEPS, BOTH)
    )
    one = carried(tmp_path, {PATH: theirs}, before=before, after=after)
    assert [hunk.how for hunk in one.hunks] == [How.CONFLICT, How.CONFLICT]
    at = theirs[: theirs.index("    other_0")].count("\n") + 1
    assert one.hunks[1].said == f"line {at}: its place is in the conflict of an earlier one"
    head, *middle, tail = sides(one.texts[PATH])
    assert [f"{head}{side}{tail}" for side in middle] == [theirs, before, after]


def test_a_conflict_may_be_the_whole_file(tmp_path: Path) -> None:
    before, after = (textwrap.dedent(text.partition("\n")[2]) for text in (STEPS, BOTH))
    theirs = before.replace("step", "other")
    one = carried(tmp_path, {PATH: theirs}, before=before, after=after)
    assert [hunk.how for hunk in one.hunks] == [How.CONFLICT, How.CONFLICT]
    assert sides(one.texts[PATH]) == ["", theirs, before, after, ""]


def test_a_hunk_behind_a_conflict_is_not_in_it(tmp_path: Path) -> None:
    rest = "\n\nA = 1\nB = 2\nC = 3\nD = 4\nE = 5\n"
    before = STEPS + rest
    after = swapped(before, ("step_4", "hook_4"), ("E = 5\n", "HOOK = 4\nE = 5\n"))
    theirs = before.replace("step", "other")
    one = carried(tmp_path, {PATH: theirs}, before=before, after=after)
    assert [hunk.how for hunk in one.hunks] == [How.CONFLICT, How.MOVED]
    assert sides(one.texts[PATH])[-1] == swapped(rest, ("E = 5\n", "HOOK = 4\nE = 5\n"))


def test_an_import_below_the_first_definition_is_not_placed_by_the_imports_above(
    tmp_path: Path,
) -> None:
    before = "import os\n\n\ndef f():\n    pass\n\n\nf()\nimport a\nimport b\n"
    after = swapped(before, ("import a\n", f"import a\n{OURS}"))
    theirs = swapped(
        before, ("import a", "import x"), ("import b", "import y"), ("\nf()", "\nf(1)")
    )
    one = carried(tmp_path, {PATH: theirs}, before=before, after=after)
    assert [hunk.how for hunk in one.hunks] == [How.CONFLICT]
    assert OURS in one.texts[PATH]


def test_what_merging_puts_into_another_definition_is_shown(tmp_path: Path) -> None:
    """The one that it is of stands there still, and two others have changed places."""
    rest = "\n\nX = 1\n"
    theirs = f"{REST.rstrip()}\n\n\nclass Base:\n{METHOD.rstrip()}{rest}"
    after = f"{BASE.removesuffix('end()' + chr(10))}hook(self)\n"
    one = carried(tmp_path, {PATH: theirs}, before=BASE + rest, after=after + rest)
    assert [(hunk.how, hunk.definition, hunk.said) for hunk in one.hunks] == [
        (
            How.CONFLICT,
            "Worker.third",
            "merging puts it in Base.second, and Worker.third is still there",
        )
    ]


def test_what_takes_a_definition_away_is_not_put_into_the_next_one(tmp_path: Path) -> None:
    second = BASE[BASE.index("    def second") : BASE.index("    def third")]
    theirs = swapped(BASE, ("        other()\n", "        another()\n"))
    one = carried(tmp_path, {PATH: theirs}, after=swapped(BASE, (second, "")))
    assert one.status is Status.MERGED
    assert one.texts[PATH] == swapped(theirs, (second, ""))
