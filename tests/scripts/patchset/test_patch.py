from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from scripts.patchset.patch import Offset, Patch, apply_patches, head, parse_patch, read_patch
from scripts.system.errors import PatchDoesNotApplyError, RegistryError
from tests.scripts.repos import BARE, bare, commit, git, stored, stored_of, write

PATH = "vllm/a.py"
NAME = "1-it/0.20.2.patch"


def numbered(*changes: tuple[int, str], count: int = 40) -> str:
    """Return lines `line 1` to `line <count>`, some of them replaced."""
    lines = {n: f"line {n}\n" for n in range(1, count + 1)}
    lines.update((number, text) for number, text in changes)
    return "".join(lines.values())


def made(tmp_path: Path, before: str, after: str, *options: str) -> Patch:
    """Return the patch that git makes of `before` and `after`."""
    text = stored_of(tmp_path / "made", {PATH: before}, {PATH: after}, *options)
    write(tmp_path, {NAME: text})
    return read_patch(tmp_path / NAME)


def applied(patch: Patch, text: str) -> str:
    return apply_patches([patch], {PATH: text}.__getitem__)[0][PATH]


def refusal(patch: Patch, text: str) -> PatchDoesNotApplyError:
    with pytest.raises(PatchDoesNotApplyError) as caught:
        applied(patch, text)
    return caught.value


class TestReading:
    def test_gives_the_head_and_counts_the_hooks(self, tmp_path: Path) -> None:
        patch = made(tmp_path, numbered(), numbered((5, "five\n5\n"), (20, ""), (30, "thirty\n")))
        assert patch.name == NAME
        assert patch.fix_id == "1"
        assert patch.serves == ("0.20.2",)
        assert [hunk.start for hunk in patch.files[PATH]] == [2, 17, 27]
        assert patch.added_lines == 3
        assert head("1-it", ["0.20.2"]) + patch.diff == (tmp_path / NAME).read_text()

    def test_gives_all_releases_of_the_head(self, tmp_path: Path) -> None:
        diff = made(tmp_path, "a\n", "b\n").diff
        text = head("K7-its-name", ["0.18.0", "0.20.1"]) + diff
        patch = parse_patch("K7-its-name/0.18.0.patch", text)
        assert (patch.fix_id, patch.serves) == ("K7", ("0.18.0", "0.20.1"))

    @pytest.mark.parametrize(
        ("after", "why"),
        [
            ({"vllm/b.py": "new\n"}, "added"),
            ({"vllm/empty.py": ""}, "added"),
            ({PATH: None}, "removed"),
            ({PATH: None, "vllm/b.py": numbered()}, "renamed"),
            ({PATH: b"\0\1\2"}, "binary"),
        ],
    )
    @pytest.mark.parametrize("options", [(), ("--binary", "--full-index"), ("--find-renames",)])
    def test_refuses_more_than_changes_of_text(
        self, tmp_path: Path, after: dict[str, str | bytes | None], why: str, options: tuple[str]
    ) -> None:
        text = stored_of(tmp_path / "made", {PATH: numbered()}, after, *options)
        self.refused(tmp_path, text, why)

    def test_refuses_a_change_of_mode(self, tmp_path: Path) -> None:
        folder = tmp_path / "made"
        commit(folder, {PATH: "a\n"}, "before")
        (folder / PATH).chmod(0o755)
        commit(folder, {})
        self.refused(tmp_path, stored(folder), "change of mode")
        git(folder, "reset", "--quiet", "--hard", "HEAD~")
        (folder / PATH).chmod(0o755)
        commit(folder, {PATH: "b\n"})
        self.refused(tmp_path, stored(folder), "change of mode")

    @pytest.mark.parametrize(
        ("old", "new", "why"),
        [
            ("Fix: 1-it\n", "", "no head"),
            ("Serves: 0.20.2\n", "", "no head"),
            ("Serves: 0.20.2\n", "Serves: \n", "no head"),
            ("Serves: 0.20.2\n", "Serves: 0.20.2\nMore: words\n", "no head"),
            ("Fix: ", "\nFix: ", "no head"),
            ("1-it", "2-that", "names 2-that"),
            ("diff --git", "diff --gif", "no head"),
            ("--- a/", "index 1..2 100644\n--- a/", "belong to no hunk"),
            ("+five\n", "+five\n+and more\n", "longer|belong to no hunk"),
            (" line 8\n", " line 8\n+and more\n", "longer|belong to no hunk"),
            (" line 8\n", "", "shorter"),
            (" line 8\n", " line 8\n-- \n2.39.5\n", "belong to no hunk"),
            ("+five\n", "+f\xffive\n", "utf-8"),
            ("@@ -2,7", "@@ -2,6", "longer|belong to no hunk"),
            ("+2,7", "+3,7", "contradict"),
            ("@@ -2,7", "@@ -02,7", "belong to no hunk"),
            ("@@ -2,7 +2,7 @@", "@@ -2,7 +2,7 @@more", "belong to no hunk"),
            (" line 8\n", " line 8", "belong to no hunk"),
            (" line 2\n", "\\ No newline at end of file\n line 2\n", "begins with a marker"),
            ("@@ -2", "\\ No newline at end of file\n@@ -2", "Unexpected marker"),
            ("+++ b/", "+++ b/../", "renamed|source"),
            ("vllm/a.py", "../a.py", "no path"),
            ("vllm/a.py", "/etc/passwd", "no path"),
            ("vllm/a.py", "vllm/\x1b[31m.py", "no path"),
            ("vllm/a.py", "vllm/./a.py", "no path"),
            ("vllm/a.py", ".git/config", "no path"),
            ("vllm/a.py", "a.py\nrename from x", "Unexpected hunk"),
        ],
    )
    def test_refuses_what_is_no_patch_of_ours(
        self, tmp_path: Path, old: str, new: str, why: str
    ) -> None:
        text = stored_of(tmp_path / "made", {PATH: numbered()}, {PATH: numbered((5, "five\n"))})
        assert old in text
        self.refused(tmp_path, text.replace(old, new), why)

    def test_refuses_a_head_without_diff(self, tmp_path: Path) -> None:
        self.refused(tmp_path, head("1-it", ["0.20.2"]), "no head of .* with a diff")

    def test_refuses_a_file_that_stands_twice(self, tmp_path: Path) -> None:
        text = stored_of(tmp_path / "made", {PATH: "a\n"}, {PATH: "b\n"})
        self.refused(tmp_path, text + text.partition("0.20.2\n")[2], "stands twice")

    def test_refuses_hunks_in_another_order(self, tmp_path: Path) -> None:
        after = numbered((5, "five\n"), (30, "thirty\n"))
        text = stored_of(tmp_path / "made", {PATH: numbered()}, {PATH: after})
        top, first, second = text.split("@@ -")
        self.refused(tmp_path, "@@ -".join((top, second, first)), "contradict")

    def test_refuses_hunks_that_overlap(self, tmp_path: Path) -> None:
        after = numbered((5, "five\n"), (30, "thirty\n"))
        text = stored_of(tmp_path / "made", {PATH: numbered()}, {PATH: after})
        assert "@@ -2,7 +2,7 @@" in text
        below = parse_patch(NAME, text.replace("@@ -27,7 +27,7 @@", "@@ -9,7 +9,7 @@"))
        assert [hunk.start for hunk in below.files[PATH]] == [2, 9]
        self.refused(tmp_path, text.replace("@@ -27,7 +27,7 @@", "@@ -8,7 +8,7 @@"), "contradict")

    def test_refuses_a_marker_at_the_beginning_of_any_hunk(self, tmp_path: Path) -> None:
        after = numbered((5, "five\n"), (30, "thirty\n"))
        text = stored_of(tmp_path / "made", {PATH: numbered()}, {PATH: after})
        marked = text.replace(" line 27\n", "\\ No newline at end of file\n line 27\n")
        assert marked != text
        self.refused(tmp_path, marked, "begins with a marker")

    def test_refuses_a_marker_in_other_words(self, tmp_path: Path) -> None:
        text = stored_of(tmp_path / "made", {PATH: "a"}, {PATH: "b\n"})
        said = text.replace("No newline at end of file", "No newline")
        assert said != text
        self.refused(tmp_path, said, "belong to no hunk")

    def test_refuses_two_patches_in_one_file(self, tmp_path: Path) -> None:
        text = stored_of(tmp_path / "made", {PATH: "a\n"}, {PATH: "b\n"})
        self.refused(tmp_path, text * 2, "belong to no hunk")

    def test_refuses_a_file_without_a_hunk_beside_one_that_has_some(self, tmp_path: Path) -> None:
        """Its header has all its lines, so counting them does not find it."""
        text = stored_of(tmp_path / "made", {PATH: "a\n"}, {PATH: "b\n"})
        start = text.index("diff --git")
        header = text[start : text.index("@@")].replace(PATH, "vllm/z.py")
        self.refused(tmp_path, text + header, "belong to no hunk")

    @staticmethod
    def refused(tmp_path: Path, text: str, why: str) -> None:
        write(tmp_path, {NAME: text.encode("latin-1" if "\xff" in text else "utf-8")})
        with pytest.raises(RegistryError, match=why) as caught:
            read_patch(tmp_path / NAME)
        assert NAME in caught.value.found
        assert caught.value.next_step.endswith(f"git restore patches/{NAME}")


class TestApplication:
    def test_changes_what_it_says_and_nothing_else(self, tmp_path: Path) -> None:
        before, after = numbered(), numbered((5, "five\n"), (20, ""), (30, "thirty\n30\n"))
        patch = made(tmp_path, before, after)
        texts, offsets = apply_patches([patch], {PATH: before}.__getitem__)
        assert texts == {PATH: after}
        assert offsets == []

    def test_reports_hunks_that_have_moved(self, tmp_path: Path) -> None:
        patch = made(tmp_path, numbered(), numbered((10, "ten\n"), (20, "twenty\n"), (30, "")))
        top, middle = "a\nb\n", "c\n"
        text = top + numbered((15, "line 15\n" + middle))
        texts, offsets = apply_patches([patch], {PATH: text}.__getitem__)
        expected = numbered((10, "ten\n"), (15, "line 15\n" + middle), (20, "twenty\n"), (30, ""))
        assert texts[PATH] == top + expected
        assert offsets == [
            Offset(NAME, PATH, 1, 2),
            Offset(NAME, PATH, 2, 3),
            Offset(NAME, PATH, 3, 3),
        ]

    def test_places_a_hunk_right_below_the_one_before(self, tmp_path: Path) -> None:
        patch = made(tmp_path, numbered(), numbered((5, "five\n"), (20, "twenty\n")))
        gone = [(number, "") for number in range(9, 17)]
        after = numbered((5, "five\n"), *gone, (20, "twenty\n"))
        assert applied(patch, numbered(*gone)) == after

    def test_reports_hunks_that_have_moved_up(self, tmp_path: Path) -> None:
        patch = made(tmp_path, numbered(), numbered((20, "twenty\n")))
        offsets = apply_patches([patch], lambda _: numbered((3, ""), (4, "")))[1]
        assert [offset.lines for offset in offsets] == [-2]

    def test_applies_one_patch_to_what_the_one_before_it_made(self, tmp_path: Path) -> None:
        first = made(tmp_path / "1", numbered(), numbered((10, "ten\n10\n")))
        second = made(tmp_path / "2", numbered((10, "ten\n")), numbered((10, "TEN\n")))
        assert "line 10" not in str(second.files)
        with pytest.raises(PatchDoesNotApplyError):
            apply_patches([second, first], lambda _: numbered())
        third = made(tmp_path / "3", numbered(), numbered((20, "twenty\n")))
        texts, offsets = apply_patches([first, third], lambda _: numbered())
        assert texts[PATH] == numbered((10, "ten\n10\n"), (20, "twenty\n"))
        assert offsets == [Offset(NAME, PATH, 1, 1)]

    def test_takes_lines_as_git_does(self, tmp_path: Path) -> None:
        before = numbered((3, "a\fb\u2028c\x1cd\x85e\n"), (4, "f\r\n"))
        after = before.replace("line 5", "five")
        patch = made(tmp_path, before, after)
        texts, offsets = apply_patches([patch], {PATH: before}.__getitem__)
        assert (texts[PATH], offsets) == (after, [])

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ("a\nb", "a\nc"),
            ("a\nb", "a\nb\n"),
            ("a\nb\n", "a\nb"),
            ("a\nb", "x\nb"),
            ("a", "b\n"),
            ("", "a\n"),
        ],
    )
    def test_knows_a_missing_newline_and_an_empty_file(
        self, tmp_path: Path, before: str, after: str
    ) -> None:
        patch = made(tmp_path, before, after)
        assert applied(patch, before) == after
        refusal(patch, before + "\n" if before else "x")


class TestRefusal:
    @pytest.mark.parametrize("stray", [5, 6, 7, 9, 10, 11])
    def test_of_context_that_differs_names_the_place(self, tmp_path: Path, stray: int) -> None:
        patch = made(tmp_path, numbered(), numbered((8, "eight\n")))
        error = refusal(patch, numbered((stray, "changed \n")))
        assert f"{NAME}, {PATH}, hunk 1:" in error.found
        assert "nearest is line 5, where 6 of 7 lines agree" in error.found
        assert f"wanted: 'line {stray}\\n'" in error.found
        assert "found:  'changed \\n'" in error.found
        assert "needs a rebase" in error.next_step

    def test_of_a_difference_that_cannot_be_seen_shows_it(self, tmp_path: Path) -> None:
        patch = made(tmp_path, numbered(), numbered((8, "eight\n")))
        error = refusal(patch, numbered((9, "line 9\r\n")))
        assert "wanted: 'line 9\\n'" in error.found
        assert "found:  'line 9\\r\\n'" in error.found

    @pytest.mark.parametrize("text", ["", "nothing of it\n"])
    def test_of_another_file_altogether(self, tmp_path: Path, text: str) -> None:
        patch = made(tmp_path, numbered(), numbered((8, "eight\n")))
        assert refusal(patch, text).found.endswith("its text is not there")

    def test_of_context_that_is_cut_off_shows_what_is_missing(self, tmp_path: Path) -> None:
        patch = made(tmp_path, numbered(), numbered((8, "eight\n")))
        error = refusal(patch, numbered(count=9))
        assert "nearest is line 5, where 5 of 7 lines agree" in error.found
        assert error.found.endswith("but not\n  wanted: 'line 10\\n'\n  found:  ''")

    def test_of_context_further_down_names_the_place(self, tmp_path: Path) -> None:
        patch = made(tmp_path, numbered(), numbered((20, "twenty\n")))
        found = refusal(patch, numbered((21, "x\n"))).found
        assert "nearest is line 17, where 6 of 7 lines agree" in found

    def test_of_a_file_that_is_no_longer_empty(self, tmp_path: Path) -> None:
        found = refusal(made(tmp_path, "", "a\n"), "b\n").found
        assert "its text stands at line 1, 2; the end of the file is where it should" in found

    def test_when_one_hunk_of_several_has_no_place(self, tmp_path: Path) -> None:
        patch = made(tmp_path, numbered(), numbered((8, "eight\n"), (20, "twenty\n")))
        assert "hunk 2" in refusal(patch, numbered((21, "x\n"))).found

    def test_when_hunks_have_changed_places(self, tmp_path: Path) -> None:
        block = "".join(f"inner {n}\n" for n in range(7))
        other = block.replace("inner", "outer")
        text = numbered((10, block), (30, other))
        patch = made(tmp_path, text, text.replace("inner 3", "i").replace("outer 3", "o"))
        assert "hunk 2" in refusal(patch, numbered((10, other), (30, block))).found


class TestTwins:
    """A place whose text stands at another place of the file as well."""

    BLOCK = "".join(f"twin {n}\n" for n in range(7))
    TEXT = numbered((10, BLOCK), (20, BLOCK))
    SECOND = 26 + 3  # the line of `twin 3` in the second one

    def changed(self, text: str, line: int) -> str:
        lines = text.splitlines(keepends=True)
        assert lines[line - 1] == "twin 3\n"
        lines[line - 1] = "changed\n"
        return "".join(lines)

    def test_are_told_apart_by_the_stated_line(self, tmp_path: Path) -> None:
        after = self.changed(self.TEXT, self.SECOND)
        assert applied(made(tmp_path, self.TEXT, after), self.TEXT) == after

    def test_are_refused_when_the_text_has_moved(self, tmp_path: Path) -> None:
        patch = made(tmp_path, self.TEXT, self.changed(self.TEXT, self.SECOND))
        error = refusal(patch, "one more\n" + self.TEXT)
        assert "stands at line 11, 27; line 26 is where it should" in error.found

    def test_are_told_apart_by_how_far_the_hunk_before_has_moved(self, tmp_path: Path) -> None:
        after = self.changed(self.TEXT, self.SECOND).replace("line 5\n", "five\n")
        patch = made(tmp_path, self.TEXT, after)
        texts, offsets = apply_patches([patch], lambda _: "one more\n" + self.TEXT)
        assert texts[PATH] == "one more\n" + after
        assert [offset.lines for offset in offsets] == [1, 1]

    def test_are_refused_where_the_other_is_at_the_stated_line(self, tmp_path: Path) -> None:
        # 16 more lines above: the first twin now stands where the second one did.
        after = self.changed(self.TEXT, self.SECOND).replace("line 5\n", "five\n")
        patch = made(tmp_path, self.TEXT, after)
        error = refusal(patch, "one more\n" * 16 + self.TEXT)
        assert "hunk 2: its text stands at line 26, 42" in error.found

    @pytest.mark.parametrize(("more", "told_apart"), [(7, True), (8, False), (9, False)])
    def test_are_told_apart_while_the_other_is_further_away(
        self, tmp_path: Path, more: int, told_apart: bool
    ) -> None:
        """They are 16 lines apart: after 8 more both are 8 from the stated line."""
        after = self.changed(self.TEXT, self.SECOND).replace("line 5\n", "five\n")
        patch = made(tmp_path, self.TEXT, after)
        if told_apart:
            assert applied(patch, "more\n" * more + self.TEXT) == "more\n" * more + after
        else:
            assert "hunk 2" in refusal(patch, "more\n" * more + self.TEXT).found

    @pytest.mark.parametrize(("line", "told_apart"), [(5, True), (15, False)])
    def test_may_follow_the_hunk_before_and_not_precede_it(
        self, tmp_path: Path, line: int, told_apart: bool
    ) -> None:
        """The first twin stands right below the hunk that changes line 5."""
        text = numbered((9, self.BLOCK), (40, self.BLOCK))
        after = text.replace(f"line {line}\n", "other\n")
        cut = after.rindex("twin 3\n")
        after = after[:cut] + "changed\n" + after[cut + len("twin 3\n") :]
        patch = made(tmp_path, text, after)
        if told_apart:
            assert applied(patch, "more\n" + text) == "more\n" + after
        else:
            assert "hunk 2" in refusal(patch, "more\n" + text).found

    def test_do_not_matter_at_the_end_also_where_one_is_at_the_stated_line(
        self, tmp_path: Path
    ) -> None:
        before = numbered(count=20) + self.BLOCK
        patch = made(tmp_path, before, before.replace("twin 6", "changed"))
        longer = before + self.BLOCK
        assert applied(patch, longer) == before + self.BLOCK.replace("twin 6", "changed")

    def test_do_not_matter_at_the_top_and_at_the_end(self, tmp_path: Path) -> None:
        text = "a\nb\nc\nd\n" * 3
        patch = made(tmp_path, text, "x\n" + text + "y\n")
        assert applied(patch, text) == "x\n" + text + "y\n"
        assert "the top of the file" in refusal(patch, "more\n" + text).found
        assert "the end of the file" in refusal(patch, text + "more\n").found


LINE = st.sampled_from(["a\n", "b\n", "a \n", "\n", "\f\n", "c\r\n", "d\x85e\n", "-- \n", "@@\n"])
TEXTS = st.one_of(
    st.lists(LINE, max_size=30).map("".join),
    st.integers(1, 40).map(lambda count: numbered(count=count)),
    st.integers(1, 6).map(lambda count: numbered(count=9) * count),
).flatmap(lambda text: st.sampled_from([text, text.removesuffix("\n")]))
EDITS = st.lists(
    st.tuples(
        st.integers(0, 60),
        st.sampled_from([0, 0, 0, 1, 9]),
        st.sampled_from(["", "a\n", "new\nb\n"]),
    ),
    max_size=4,
)


def edited(text: str, edits: list[tuple[int, int, str]]) -> str:
    """Replace, from a line on, some lines by others."""
    lines = text.split("\n")
    for at, count, new in edits:
        at %= len(lines) + 1
        lines[at : at + count] = new.split("\n")[:-1]
    return "\n".join(lines)


class TestAgainstGit:
    """Wherever we apply, `git apply` does too, to the same bytes; so what it refuses, we refuse."""

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(before=TEXTS, edits=EDITS, drifts=EDITS)
    @example(before=numbered(), edits=[(9, 1, "a\n"), (29, 1, "a\n")], drifts=[(19, 0, "a\n")])
    @example(before="a\nb\n" * 15, edits=[(14, 1, "new\nb\n")], drifts=[(0, 0, "a\n")])
    @example(before="a\nb\n" * 15, edits=[(29, 1, "new\nb\n")], drifts=[(29, 0, "a\n")])
    def test_apply(
        self, before: str, edits: list[tuple[int, int, str]], drifts: list[tuple[int, int, str]]
    ) -> None:
        after, other = edited(before, edits), edited(before, drifts)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            old, new, file = folder / "a.py", folder / "b.py", folder / "1.patch"
            old.write_bytes(before.encode())
            new.write_bytes(after.encode())
            command = ["git", "diff", "--no-index", "--text", "--no-color", "a.py", "b.py"]
            diff = subprocess.run(
                command, cwd=folder, capture_output=True, env=BARE, check=False
            ).stdout.decode()
            if not diff:
                return
            diff = diff.replace("b/b.py", "b/a.py")
            text = f"Fix: 1-it\nServes: 0.20.2\n{bare(diff)}"
            file.write_bytes(text.encode())
            patch = parse_patch(NAME, text)
            for text in (before, other):
                old.write_bytes(text.encode())
                command = ["git", "apply", "--whitespace=nowarn", "1.patch"]
                result = subprocess.run(
                    command, cwd=folder, capture_output=True, env=BARE, check=False
                )
                try:
                    ours = apply_patches([patch], lambda _: text)[0]["a.py"]  # noqa: B023
                except PatchDoesNotApplyError:
                    assert text != before  # what a patch was made from, it applies to
                    continue
                assert result.returncode == 0, result.stderr
                assert old.read_bytes().decode() == ours
            assert apply_patches([patch], lambda _: before)[0]["a.py"] == after
