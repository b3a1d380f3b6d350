from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts.patchset.registry import Fix, load_registry
from scripts.system.errors import RegistryError
from tests.scripts import toys
from tests.scripts.repos import commit, git, mbox

ENTRY = """\
[[fix]]
id = "1"
slug = "a-name"
headline = "without it"
title = "1 is right"
kind = "backport"
upstream-pr = "vllm-project/vllm#1"
upstream-status = "Backport"
applies-to = "<=0.20.2"
fixed-in = ""
remove-when = "it passes"
wire-compat = "none"
tests = ["tests/a.py", "tests/b.py::test"]
depends-on = []
symptom = "a"
cause = "b"
change = "c"
risk = "d"
"""
HEAD = 'author = "A Person <a@example.org>"\n'
SECOND = ENTRY.replace('"1"', '"K2"').replace("depends-on = []", 'depends-on = ["1"]')


def loaded(tmp_path: Path, text: str) -> dict[str, Fix]:
    path = tmp_path / "fixes.toml"
    path.write_text(text, encoding="utf-8")
    return load_registry(path).fixes


def faults(tmp_path: Path, text: str) -> str:
    with pytest.raises(RegistryError) as caught:
        loaded(tmp_path, text)
    assert "fixes.toml" in caught.value.next_step
    return caught.value.found


class TestReading:
    def test_gives_each_fix_once_and_in_order(self, tmp_path: Path) -> None:
        fixes = loaded(tmp_path, HEAD + ENTRY + SECOND)
        assert list(fixes) == ["1", "K2"]
        assert fixes["1"].tests == ("tests/a.py", "tests/b.py::test")
        assert fixes["1"].name == "1-a-name"
        assert fixes["1"].upstream_url == "https://github.com/vllm-project/vllm/pull/1"
        assert fixes["K2"].depends_on == ("1",)
        assert fixes["1"].upstream_tests == ()

    def test_security_is_optional_and_what_is_left_to_do_needs_it(self, tmp_path: Path) -> None:
        action = 'security-action = "name the peers"\n'
        assert loaded(tmp_path, HEAD + ENTRY)["1"].security == ""
        assert "without security" in faults(tmp_path, HEAD + ENTRY + action)
        whole = loaded(tmp_path, HEAD + ENTRY + 'security = "end the engine"\n' + action)["1"]
        assert (whole.security, whole.security_action) == ("end the engine", "name the peers")

    def test_gives_the_tests_of_a_release_that_fail_with_a_fix(self, tmp_path: Path) -> None:
        more = '[[fix.upstream-test]]\nreleases = "<1"\ntest = "tests/x.py"\nreason = "wrong ids"\n'
        (one,) = loaded(tmp_path, HEAD + ENTRY + more)["1"].upstream_tests
        assert (one.releases, one.test, one.reason) == ("<1", "tests/x.py", "wrong ids")

    def test_gives_the_tests_that_pass_on_the_stock_of_some_releases(self, tmp_path: Path) -> None:
        more = '[[fix.spared]]\nreleases = ">1"\ntests = ["tests/a.py"]\nreason = "half is fixed"\n'
        fix = loaded(tmp_path, HEAD + ENTRY + more)["1"]
        assert fix.spared_on("1.1") == ("tests/a.py",)
        assert fix.spared_on("1.0") == ()

    def test_gives_why_an_affected_release_has_no_patch(self, tmp_path: Path) -> None:
        more = '[[fix.unpatched]]\nreleases = ">=0.20"\nreason = "nobody runs it"\n'
        fix = loaded(tmp_path, HEAD + ENTRY + more)["1"]
        assert fix.unpatched_on("0.20.1") == "nobody runs it"
        assert fix.unpatched_on("0.19.1") == ""
        assert fix.unpatched_on("0.21.0") == ""  # it does not have the defect

    def test_gives_the_fix_whose_patch_closes_it_too(self, tmp_path: Path) -> None:
        more = '[[fix.unpatched]]\nreleases = "<0.20"\nreason = "as well"\nclosed-by = "1"\n'
        second = ENTRY.replace('id = "1"', 'id = "2"') + more
        fix = loaded(tmp_path, HEAD + ENTRY + second)["2"]
        assert [fix.closed_by(one) for one in ("0.19.1", "0.20.0", "0.21.0")] == ["1", "2", ""]
        assert [fix.needed_on(one) for one in ("0.19.1", "0.20.0", "0.21.0")] == [
            False,
            True,
            False,
        ]

    def test_gives_the_tests_of_a_part_that_has_no_patch(self, tmp_path: Path) -> None:
        more = 'releases = "<0.20"\nreason = "no such endpoint"\ntests = ["tests/a.py::test[x]"]\n'
        fix = loaded(tmp_path, f"{HEAD}{ENTRY}[[fix.unpatched]]\n{more}")["1"]
        assert fix.left_open_on("0.19.1") == ("tests/a.py::test[x]",)
        assert fix.left_open_on("0.20.0") == ()
        assert fix.unpatched_on("0.19.1") == ""

    @pytest.mark.parametrize(
        ("old", "new", "fault"),
        [
            ('"Backport"', '"Merged"', "upstream-status is none of"),
            ('"vllm-project/vllm#1"', '"#1"', "not of the form owner/repository#number"),
            ('"<=0.20.2"', '"until 0.20"', "no PEP 440 specifier"),
            ('"<=0.20.2"', '""', "applies_to is empty"),
            ('risk = "d"\n', "", "risk"),
            ('risk = "d"\n', 'risk = ""\n', "risk is empty"),
            ('risk = "d"\n', 'risk = "d"\nrisc = "d"\n', "risc"),
            ('id = "1"', "id = 1", "id: text and lists are mixed up"),
            ('id = "1"', 'id = "one"', "id is no number"),
            ('tests = ["tests/a.py", "tests/b.py::test"]', 'tests = "t"', "tests: text and lists"),
            ('headline = "without it"\n', "", "headline"),
            ('headline = "without it"\n', 'headline = ""\n', "headline is empty"),
            ('"without it"', f'"{"a" * 61}"', "headline has more than 60 characters"),
            ('"without it"', '"a\\nb"', "headline is not one line"),
            ('title = "1 is right"', 'title = ["a"]', "title: text and lists"),
            ('"it passes"', '"it\\npasses"', "remove_when is not one line"),
            ('"tests/a.py"', '"tests/a.py\\n"', "not one line"),
            (
                "depends-on = []",
                'depends-on = ["7"]',
                "depends on a fix that does not stand before",
            ),
            ('risk = "d"\n', 'risk = "d"\n[[fix.upstream-test]]\ntest = "x"\n', "releases"),
            ('author = "A Person <a@example.org>"\n', "", "author is not of the form"),
            ("A Person <a@example.org>", "A Person", "author is not of the form"),
            ("[[fix]]", "[[fix]", "it is no TOML"),
            ("[[fix]]", "x = " + "[" * 100_000, "it is no TOML: its brackets"),
            ("[[fix]]", "[fix]", "fix is no list of tables"),
            ('slug = "a-name"', 'slug = "../a"', "slug is not of small letters"),
            ('id = "1"', 'id = "\u0661"', "id is no number"),
            ('"<=0.20.2"', f'"<{"9" * 5000}"', "no PEP 440 specifier"),
            ('"d"', '"d\\u001b[31m"', "cannot be shown"),
            ('"d"', '"d\\u202e"', "cannot be shown"),
            ("A Person", "A \\u001b[31mPerson", "author is not of the form"),
            ("depends-on = []", "depends-on = [[]]", "depends_on: text and lists"),
            ('["tests/a.py", "tests/b.py::test"]', "[1]", "tests: text and lists"),
            ('risk = "d"\n', 'risk = "d"\nspared = "x"\n', "spared is no list of tables"),
            ('risk = "d"\n', 'risk = "d"\nforward-test = [1]\n', "forward-test is no list"),
            (
                'risk = "d"\n',
                'risk = "d"\n[[fix.unpatched]]\nreleases = "all"\nreason = "x"\n',
                "unpatched: Invalid specifier",
            ),
            (
                'risk = "d"\n',
                'risk = "d"\n[[fix.unpatched]]\nreleases = "<1"\nreason = "x"\nclosed-by = "9"\n',
                "fix 1 is closed by a fix that does not stand before it",
            ),
            (
                'risk = "d"\n',
                'risk = "d"\n[[fix.spared]]\nreleases = "<1"\nreason = "x"\ntests = [1]\n',
                "tests: text and lists",
            ),
            (
                'risk = "d"\n',
                'risk = "d"\n[[fix.upstream-test]]\nreleases = "<1"\nreason = 1\ntest = "a"\n',
                "upstream-test: text and lists",
            ),
        ],
    )
    def test_names_what_is_wrong(self, tmp_path: Path, old: str, new: str, fault: str) -> None:
        text = HEAD + ENTRY
        assert text.count(old) == 1
        assert fault in faults(tmp_path, text.replace(old, new))

    def test_names_all_that_is_wrong_at_once(self, tmp_path: Path) -> None:
        text = HEAD + SECOND + ENTRY.replace('"Backport"', '"x"') + ENTRY.replace('"d"', '""')
        found = faults(tmp_path, text)
        assert "fix K2 depends on a fix that does not stand before it" in found
        assert "fix 1: upstream-status" in found
        assert "fix 1 stands twice" in found
        assert "fix 1: risk is empty" in found


def test_a_fix_knows_the_releases_that_have_the_defect() -> None:
    one = toys.fix("1", applies_to=">=0.20.0,<=0.21.0")
    assert [one.affects(name) for name in ("0.19.0", "0.20.0", "0.21.0", "0.21.1")] == [
        False, True, True, False,
    ]  # fmt: skip
    assert toys.fix("1", applies_to="<0.21").affects("0.20.3rc1")


def test_dependencies_are_followed_to_their_end() -> None:
    chain = toys.registry(
        toys.fix("1"),
        toys.fix("2", depends_on=("1",)),
        toys.fix("3", depends_on=("2",)),
        toys.fix("4"),
    )
    assert chain.with_dependencies({"3"}) == {"1", "2", "3"}
    assert chain.with_dependencies({"4", "1"}) == {"1", "4"}
    assert chain.with_dependencies(set()) == set()


class TestMessage:
    """From the registry to a commit, to a patch, and back: nothing is lost or made up."""

    FIX = toys.fix(
        "K7",
        title="blocks expand with the remote ratio → nothing else " + "and so on " * 8 + "end",
        upstream_pr="",
        fixed_in="",
        tests=("tests/a.py::test[x: y]", "tests/" + "very_long_" * 12 + ".py"),
        depends_on=("1", "K2"),
        symptom="Fix: is a word here.\nSigned-off-by: neither is this.\n\n---\ndiff --git a/x b/x",
        cause="From here to there, größer.",
    )
    REGISTRY = toys.registry(FIX)

    def test_comes_back_from_an_mbox(self, tmp_path: Path) -> None:
        message = self.REGISTRY.message(self.FIX)
        commit(tmp_path, {"a.py": "a\n"}, "before")
        commit(tmp_path, {"a.py": "b\n"}, message)
        path = tmp_path / "it.patch"
        path.write_bytes(mbox(tmp_path).encode())
        git(tmp_path, "switch", "--quiet", "--detach", "HEAD~")
        git(tmp_path, "am", "--quiet", "--keep", str(path))
        back = git(tmp_path, "show", "-s", "--format=%B", "HEAD")
        assert back.rstrip("\n") + "\n" == "[PATCH] " + message

    def test_has_the_trailers_that_git_reads(self) -> None:
        read = subprocess.run(
            ["git", "interpret-trailers", "--parse"],
            input=self.REGISTRY.message(self.FIX).encode(),
            capture_output=True,
            check=True,
        ).stdout.decode()
        expected = [f"{key}: {value}" for key, value in self.REGISTRY.trailers(self.FIX)]
        assert read.splitlines() == expected

    def test_keeps_what_an_operator_looks_for_in_one_piece(self) -> None:
        words = "it says --kv-transfer-config and `Potentially-invalid-KV-blocks` there " * 4
        one = toys.fix("1", symptom=words)
        message = toys.registry(one).message(one)
        assert message.count("--kv-transfer-config") == 4
        assert message.count("Potentially-invalid-KV-blocks") == 4
        assert max(map(len, message.partition("\n\nFix: ")[0].splitlines())) <= 72

    def test_says_none_rather_than_nothing(self) -> None:
        trailers = dict(self.REGISTRY.trailers(self.FIX))
        assert trailers["Upstream-PR"] == "none"
        assert trailers["Fixed-In"] == "unproven"
        assert "" not in trailers.values()
