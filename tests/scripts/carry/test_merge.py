"""What becomes of a patch on a release whose text is another one."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from scripts.carry.merge import Carried, How, Source, Status, carry
from scripts.carry.moved import definition_at, definitions, where_it_went
from scripts.patchset.patch import Patch, read_patch
from scripts.system.git import Repository
from tests.scripts.repos import commit, git, stored_of, write

PATH = "vllm/a/worker.py"
BASE = textwrap.dedent(
    '''\
    """Work."""
    import os
    import sys
    from vllm import one
    from vllm import two
    from vllm import three


    class Worker:
        def first(self):
            step_one()
            step_two()
            step_three()
            step_four()

        def second(self):
            begin()
            go_on()
            halt()
            end()

        def third(self):
            begin()
            other()
            halt()
            end()
    '''
)
FIXED = BASE.replace(
    "from vllm import two\n", "from vllm import two\nfrom ours import hook\n"
).replace("        go_on()\n", "        hook(self)\n")


def a_patch(folder: Path, before: str = BASE, after: str = FIXED) -> Patch:
    name = "1-it/0.20.2.patch"
    write(folder, {name: stored_of(folder, {PATH: before}, {PATH: after})})
    return read_patch(folder / name)


def carried(
    folder: Path, ours: Mapping[str, str], *, before: str = BASE, after: str = FIXED
) -> Carried:
    """Carry the patch from `before` to `after` to a release with the files `ours`."""
    return carried_to(folder / "target", a_patch(folder / "source", before, after), ours, before)


def carried_to(
    target: Path,
    patch: Patch,
    release: Mapping[str, str],
    before: str = BASE,
    now: Mapping[str, str] | None = None,
    **how: bool,
) -> Carried:
    """Carry a patch of the file `before` to a release; `now` are its files by now."""
    commit(target, release, "the release")
    git(target, "tag", "v2")
    was, there = {PATH: before}, release if now is None else now
    return carry(patch, lambda path: was.get(path, ""), there.get, Repository(target), "v2", **how)


def swapped(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def test_a_person_looks_at_what_collides_and_at_what_upstream_may_have() -> None:
    stops = {status for status in Status if status.stops}
    assert stops == {Status.HINT, Status.PARTLY, Status.CONFLICT, Status.GONE}


def test_what_is_the_same_is_carried_as_it_is(tmp_path: Path) -> None:
    one = carried(tmp_path, {PATH: BASE})
    assert one.status is Status.CARRIED
    assert one.texts == {PATH: FIXED}
    assert [(h.number, h.how, h.definition) for h in one.hunks] == [
        (1, How.EXACT, ""),
        (2, How.EXACT, "Worker.second"),
    ]


def test_what_has_moved_is_carried_with_its_offset(tmp_path: Path) -> None:
    more = swapped(BASE, ("class Worker:\n", "A = 1\nB = 2\n\n\nclass Worker:\n"))
    one = carried(tmp_path, {PATH: more})
    assert one.status is Status.OFFSETS
    assert [(h.how, h.said) for h in one.hunks] == [(How.EXACT, ""), (How.MOVED, "+4 lines")]
    assert one.texts[PATH] == swapped(
        FIXED, ("class Worker:\n", "A = 1\nB = 2\n\n\nclass Worker:\n")
    )


def test_where_the_patch_was_made_from_a_longer_text_nothing_has_moved(tmp_path: Path) -> None:
    """A fix above it was left out, so both texts lack what the patch counts."""
    longer = ('"""Work."""\n', '"""Work."""\n' + "# more\n" * 8)
    patch = a_patch(tmp_path / "source", swapped(BASE, longer), swapped(FIXED, longer))
    one = carried_to(tmp_path / "target", patch, {PATH: BASE})
    assert [(h.how, h.definition) for h in one.hunks] == [
        (How.EXACT, ""),
        (How.EXACT, "Worker.second"),
    ]
    assert one.texts == {PATH: FIXED}


@pytest.mark.parametrize(
    ("rest", "how", "said"),
    [
        ("\n    def last(self):\n        pass\n", How.MOVED, "+7 lines"),
        ("", How.MERGED, "placed by what it hangs on"),
    ],
    ids=["its whole text stands there once", "the lines below it are others"],
)
def test_what_a_merge_cannot_follow_goes_to_its_one_place(
    rest: str, how: How, said: str, tmp_path: Path
) -> None:
    """Two methods stand in another order than where the patch was made."""
    second, third = (f"    def {one}" for one in BASE.split("    def ")[2:])
    turned = BASE.replace(second + third, f"{third}\n{second}".rstrip("\n") + "\n")
    one = carried(tmp_path, {PATH: turned + rest}, before=BASE + rest, after=FIXED + rest)
    assert [(h.how, h.said) for h in one.hunks] == [(How.EXACT, ""), (how, said)]
    assert "def second(self):\n        begin()\n        hook(self)\n" in one.texts[PATH]


@pytest.mark.parametrize(
    ("changes", "number", "said"),
    [
        ([("import sys\n", "import sys, json\n")], 1, "its surroundings have changed"),
        ([("def second(self)", "def second(self, more)")], 2, "its surroundings have changed"),
        (
            [("class Worker:", "class Base:"), ("def second(self)", "def second(self, more)")],
            2,
            "in Base.second now",
        ),
    ],
)
def test_what_has_other_surroundings_is_merged(
    changes: list[tuple[str, str]], number: int, said: str, tmp_path: Path
) -> None:
    one = carried(tmp_path, {PATH: swapped(BASE, *changes)})
    assert one.status is Status.MERGED
    assert [(h.number, h.said) for h in one.hunks if h.how is How.MERGED] == [(number, said)]
    assert one.texts[PATH] == swapped(FIXED, *changes)


def test_an_import_goes_beside_what_it_stood_by(tmp_path: Path) -> None:
    around = ("from vllm import three\n", "from vllm import 三\nfrom vllm import four\n")
    near = ("from vllm import two\n", "from vllm import two\nfrom vllm import two_more\n")
    one = carried(tmp_path, {PATH: swapped(BASE, around, near)})
    assert one.status is Status.MERGED
    assert one.hunks[0].said == "an import, beside the same line"
    assert (
        "from vllm import two\nfrom ours import hook\nfrom vllm import two_more\n"
        in one.texts[PATH]
    )


def test_an_import_does_not_go_between_parentheses(tmp_path: Path) -> None:
    other = swapped(BASE, ("from vllm import two\n", "from vllm import (\n    two,\n"))
    other = swapped(other, ("from vllm import three\n", "    three,\n)\n"))
    one = carried(tmp_path, {PATH: other})
    assert "from vllm import one\nfrom ours import hook\nfrom vllm import (\n" in one.texts[PATH]


@pytest.mark.parametrize("header", ["def f():", "async def f():", "class C:"])
def test_an_import_does_not_go_below_a_definition(header: str, tmp_path: Path) -> None:
    before = "from vllm import one\nfrom vllm import two\nfrom vllm import three\n"
    after = before.replace("import two\n", "import two\nfrom ours import hook\n")
    ours = f"{header}\n    pass\n\n\nfrom vllm import two\nfrom vllm import other\n"
    one = carried(tmp_path, {PATH: ours}, before=before, after=after)
    assert one.status is Status.CONFLICT


def test_what_collides_has_markers_and_says_what_is_there(tmp_path: Path) -> None:
    one = carried(tmp_path, {PATH: swapped(BASE, ("        go_on()\n", "        go_further()\n"))})
    assert one.status is Status.CONFLICT
    assert [hunk.how for hunk in one.hunks] == [How.EXACT, How.CONFLICT]
    assert one.hunks[1].said.endswith(":\n        go_further()")
    text = one.texts[PATH]
    assert "<<<<<<< vLLM 2\n        go_further()\n|||||||" in text
    assert "from ours import hook" in text


def test_what_is_there_already_is_a_hint_and_no_more(tmp_path: Path) -> None:
    assert carried(tmp_path / "all", {PATH: FIXED}).status is Status.HINT
    part = swapped(BASE, ("        go_on()\n", "        hook(self)\n"))
    one = carried(tmp_path / "part", {PATH: part})
    assert one.status is Status.PARTLY
    assert [(h.how, h.said) for h in one.hunks] == [
        (How.EXACT, ""),
        (How.THERE, "the release has it"),
    ]
    assert one.texts[PATH] == FIXED


def test_what_empties_a_file_that_is_empty_is_there_already(tmp_path: Path) -> None:
    one = carried(tmp_path, {PATH: ""}, before="x = 1\n", after="")
    assert [hunk.how for hunk in one.hunks] == [How.THERE]
    assert one.texts == {PATH: ""}


def test_a_twin_at_the_stated_line_is_not_taken_for_the_place(tmp_path: Path) -> None:
    """The text stands where the patch says, and yet that is another function now."""
    calls = "".join(f"        {call}()\n" for call in ("a", "b", "c", "go_on", "d", "e", "f"))
    first = f"    def second(self):\n{calls}"
    before = f"class Worker:\n{first}\n    x = 1\n"
    after = before.replace("        go_on()\n", "        hook(self)\n")
    twin = first.replace("second", "twin")
    ours = f"class Worker:\n{twin}\n{first}\n    x = 1\n"
    one = carried(tmp_path, {PATH: ours}, before=before, after=after)
    # Merging sees that a function was put above it; the twin is not changed.
    assert one.texts[PATH].index("hook(self)") > one.texts[PATH].index("def second")
    assert [(h.how, h.said) for h in one.hunks] == [
        (How.CONFLICT, "its text stands at line 6, and merging changes line 15")
    ]


METHOD = BASE[BASE.index("    def second") : BASE.index("    def third")]
REST = BASE.replace(METHOD, "")
SPLIT = (
    f"from vllm import base\n\n\nA = 1\nB = 2\nC = 3\n\n\nclass Base:\n{METHOD}".rstrip("\n") + "\n"
)


def test_a_definition_that_has_moved_is_followed_with_its_imports(tmp_path: Path) -> None:
    """Upward: a class is split, and what the fix hangs on is a base's, in another module."""
    one = carried(tmp_path, {PATH: REST, "vllm/a/base.py": SPLIT})
    assert one.status is Status.MERGED
    assert [(hunk.how, hunk.said) for hunk in one.hunks] == [
        (How.MERGED, "imports, gone with what uses them"),
        (How.MERGED, "in vllm/a/base.py, Base.second now"),
    ]
    hooked = swapped(SPLIT, ("import base\n", "import base\nfrom ours import hook\n"))
    assert one.texts == {"vllm/a/base.py": swapped(hooked, ("go_on()", "hook(self)"))}


def test_a_definition_that_has_moved_is_followed_back(tmp_path: Path) -> None:
    """Downward: the other release has not split the class yet, and there is no such module."""
    base = "vllm/a/base.py"
    fixed = swapped(SPLIT, ("import base\n", "import base\nfrom ours import hook\n"))
    fixed = swapped(fixed, ("go_on()", "hook(self)"))
    name, source = "1-it/0.20.2.patch", tmp_path / "source"
    write(source, {name: stored_of(source, {base: SPLIT}, {base: fixed})})
    patch = read_patch(source / name)
    target = tmp_path / "target"
    commit(target, {PATH: BASE}, "the release")
    git(target, "tag", "v1")
    was = {base: SPLIT, PATH: REST}
    one = carry(patch, lambda path: was.get(path, ""), {PATH: BASE}.get, Repository(target), "v1")
    assert one.status is Status.MERGED
    after = swapped(BASE, ("import three\n", "import three\nfrom ours import hook\n"))
    assert one.texts == {PATH: swapped(after, ("        go_on()", "        hook(self)"))}


def test_what_has_moved_to_one_module_is_put_there_together(tmp_path: Path) -> None:
    after = FIXED.removesuffix("        end()\n") + "        hook(self)\n"
    moved = BASE[BASE.index("    def second") :]
    head, there = "from vllm import base\n", f"\n\nclass Base:\n{moved}"
    ours = {PATH: BASE.removesuffix(f"\n{moved}"), "vllm/a/base.py": head + there}
    one = carried(tmp_path, ours, after=after)
    hooked = f"\n\nclass Base:\n{after[after.index('    def second') :]}"
    assert one.texts["vllm/a/base.py"] == f"{head}from ours import hook\n{hooked}"


def test_what_has_moved_within_its_module_is_carried_with_what_stays(tmp_path: Path) -> None:
    """What stays is found where it stands once the other is in its place, without markers."""
    after = swapped(BASE, ("        go_on()\n", "        hook(self)\n"))
    after = after.removesuffix("        end()\n") + "        hook(self)\n"
    ours = swapped(REST, ("class Worker:\n", f"class Base:\n{METHOD}\nclass Worker:\n"))
    one = carried(tmp_path, {PATH: ours}, after=after)
    assert one.status is Status.MERGED
    assert [(h.number, h.how, h.said) for h in one.hunks] == [
        (1, How.MERGED, f"in {PATH}, Base.second now"),
        (2, How.MOVED, "+2 lines"),
    ]
    hooked = swapped(ours, ("        go_on()\n", "        hook(self)\n"))
    assert one.texts == {PATH: hooked.removesuffix("        end()\n") + "        hook(self)\n"}


def test_imports_stay_for_what_stays(tmp_path: Path) -> None:
    after = FIXED.removesuffix("        end()\n") + "        hook(self)\n"
    ours = {PATH: REST, "vllm/a/base.py": SPLIT}
    one = carried(tmp_path, ours, after=after)
    assert one.status is Status.MERGED
    assert all("from ours import hook\n" in text for text in one.texts.values())
    assert one.texts[PATH].count("hook(self)") == 1


def test_what_may_have_gone_to_two_places_needs_a_person(tmp_path: Path) -> None:
    ours = {PATH: REST, "vllm/a/base.py": SPLIT, "vllm/a/push.py": SPLIT}
    one = carried(tmp_path, ours)
    assert one.status is Status.GONE
    assert {place.path for place in one.hunks[1].went} == {"vllm/a/base.py", "vllm/a/push.py"}


def test_what_stood_elsewhere_before_is_not_what_has_moved(tmp_path: Path) -> None:
    patch = a_patch(tmp_path / "source")
    target = tmp_path / "target"
    ours = {PATH: REST, "vllm/a/twin.py": SPLIT}
    commit(target, ours, "the release")
    git(target, "tag", "v2")
    was = {PATH: BASE, "vllm/a/twin.py": SPLIT}
    one = carry(patch, lambda path: was.get(path, ""), ours.get, Repository(target), "v2")
    assert one.status is Status.GONE


def test_what_has_moved_and_collides_needs_a_person(tmp_path: Path) -> None:
    other = swapped(SPLIT, ("        go_on()\n", "        go_further()\n"))
    one = carried(tmp_path, {PATH: REST, "vllm/a/base.py": other})
    assert one.status is Status.GONE
    assert "vllm/a/base.py" not in one.texts


def test_a_definition_without_a_place_for_its_import_is_proposed(tmp_path: Path) -> None:
    there = f"class Base:\n{METHOD}".rstrip("\n") + "\n"
    one = carried(tmp_path, {PATH: REST, "vllm/b/base.py": there})
    assert one.status is Status.GONE
    place = one.hunks[1].went[0]
    assert (place.path, place.name, place.share) == ("vllm/b/base.py", "Base.second", 1.0)
    assert "proposed in vllm/b/base.py" in one.hunks[1].said
    assert one.texts["vllm/b/base.py"] == there.replace("go_on()", "hook(self)")


def test_a_module_that_has_moved_is_followed(tmp_path: Path) -> None:
    one = carried(tmp_path, {"vllm/core.py": BASE, "vllm/other.py": "x = 1\n"})
    assert one.status is Status.MERGED
    assert [hunk.said for hunk in one.hunks] == ["the module is vllm/core.py now"] * 2
    assert one.texts == {"vllm/core.py": FIXED}


def test_a_module_that_is_where_it_was_is_not_followed(tmp_path: Path) -> None:
    one = carried(tmp_path, {PATH: BASE, "vllm/core.py": BASE})
    assert one.status is Status.CARRIED
    assert one.texts == {PATH: FIXED}


@pytest.mark.parametrize(
    ("change", "how", "said"),
    [
        (("class Worker:", "A = 1\n\n\nclass Worker:"), How.MERGED, "the module is {} now"),
        (("go_on()", "go_further()"), How.CONFLICT, "{}: line 19:\n        go_further()"),
        (("        go_on()", "        hook(self)"), How.THERE, "{}: the release has it"),
    ],
)
def test_what_becomes_of_a_hunk_is_said_of_the_module_that_has_moved(
    change: tuple[str, str], how: How, said: str, tmp_path: Path
) -> None:
    one = carried(tmp_path, {"vllm/core.py": swapped(BASE, change)})
    assert [(h.how, h.said) for h in one.hunks] == [
        (How.MERGED, "the module is vllm/core.py now"),
        (how, said.format("vllm/core.py")),
    ]
    assert one.texts.keys() == {"vllm/core.py"}


def test_what_a_fix_renames_is_followed_into_a_module_that_has_moved(tmp_path: Path) -> None:
    """Its second hunk looks for the name that the first one has changed there already."""
    first, second = (
        f"    def {name}(self):\n" + "".join(f"        {name}_{n}()\n" for n in range(lines))
        for name, lines in (("first", 12), ("second", 10))
    )
    before = f"class Worker:\n{second}\n{first}"
    changes = (("def second", "def renamed"), ("second_8()", "hook(self)"))
    there = f"class Worker:\n{first}\n{swapped(second, ('second_7()', 'other()'))}"
    one = carried(tmp_path, {"vllm/core.py": there}, before=before, after=swapped(before, *changes))
    assert one.status is Status.MERGED
    assert one.texts == {"vllm/core.py": swapped(there, *changes)}


def test_a_module_that_may_be_either_of_two_needs_a_person(tmp_path: Path) -> None:
    one = carried(tmp_path, {"vllm/core.py": BASE, "vllm/other.py": BASE})
    assert one.status is Status.GONE
    assert {place.path for place in one.hunks[1].went} == {"vllm/core.py", "vllm/other.py"}


def test_what_is_nowhere_is_not_proposed(tmp_path: Path) -> None:
    one = carried(tmp_path, {"vllm/other.py": "x = 1\n"})
    assert one.status is Status.GONE
    assert [(h.went, h.said) for h in one.hunks] == [((), f"there is no {PATH}")] * 2
    assert one.texts == {}


def test_what_is_gone_is_only_looked_for_where_a_person_is_to_see_it(tmp_path: Path) -> None:
    ours = {PATH: REST, "vllm/a/base.py": SPLIT, "vllm/a/push.py": SPLIT}
    patch = a_patch(tmp_path / "source")
    one = carried_to(tmp_path / "target", patch, ours, looking=False)
    assert one.status is Status.GONE
    assert [hunk.went for hunk in one.hunks] == [(), ()]


def test_likeness_alone_is_named_and_not_changed(tmp_path: Path) -> None:
    renamed = BASE.replace("def second", "def renamed").replace("go_on()", "go_on()  # here")
    one = carried(tmp_path, {PATH: renamed})
    hunk = one.hunks[1]
    assert (hunk.how, [place.name for place in hunk.went][:1]) == (How.GONE, ["Worker.renamed"])
    assert "proposed" not in hunk.said


def test_a_fix_is_merged_without_those_that_were_left_out(tmp_path: Path) -> None:
    first = a_patch(tmp_path / "first", BASE, FIXED)
    both = FIXED.replace(
        "from ours import hook\n", "from ours import hook\nfrom ours import more\n"
    )
    second = a_patch(
        tmp_path / "second", FIXED, both.replace("        other()\n", "        more()\n")
    )
    source = Source({PATH: BASE}.__getitem__)
    assert source.before(first)(PATH) == BASE
    source.add(first, carried=False)
    # It needs the first one's import beside its own, so it is taken with it.
    assert source.before(second)(PATH) == FIXED
    alone = a_patch(
        tmp_path / "alone", FIXED, FIXED.replace("        other()\n", "        more()\n")
    )
    assert source.before(alone)(PATH) == BASE


@pytest.mark.parametrize(
    ("carries", "change", "text"),
    [
        (True, ("        other()\n", "        more()\n"), FIXED),
        (False, ("        other()\n", "        more()\n"), BASE),
        (False, ("        hook(self)\n", "        hook(self, 2)\n"), FIXED),
    ],
    ids=["all", "one was left out", "one was left out that the other needs"],
)
def test_a_fix_is_merged_with_those_that_were_carried(
    carries: bool, change: tuple[str, str], text: str, tmp_path: Path
) -> None:
    both = swapped(FIXED, change)
    first = a_patch(tmp_path / "first")
    second = a_patch(tmp_path / "second", FIXED, both)
    third = a_patch(tmp_path / "third", both, swapped(both, ("step_four()", "step_five()")))
    source = Source({PATH: BASE}.__getitem__)
    source.add(first, carried=carries)
    source.add(second, carried=True)
    assert source.before(third)(PATH) == swapped(text, change)


@pytest.mark.parametrize(
    ("line", "name"),
    [(1, None), (9, "Worker"), (10, "Worker.first"), (18, "Worker.second"), (99, None)],
)
def test_the_definition_around_a_line(line: int, name: str | None) -> None:
    found = definition_at(BASE, line)
    assert (found and found.name) == name


def test_decorators_belong_to_a_definition_and_nonsense_has_none() -> None:
    (one,) = definitions("x = 1\n\n@first\n@second(\n  2)\nasync def f():\n    pass\n")
    assert (one.name, one.first, one.last) == ("f", 3, 7)
    assert definitions("<<<<<<< no Python\n") == ()


def test_a_name_that_is_everywhere_leads_nowhere(tmp_path: Path) -> None:
    files = {f"vllm/far/m{n}.py": f"def f():\n    return {n}\n" for n in range(30)}
    commit(tmp_path, files, "many")
    git(tmp_path, "tag", "v2")
    text = "def f():\n    a()\n    b()\n"
    (definition,) = definitions(text)
    found = where_it_went(text, definition, "vllm/deep/er/x.py", Repository(tmp_path), "v2")
    assert [place for place in found if place.share > 0.4] == []
