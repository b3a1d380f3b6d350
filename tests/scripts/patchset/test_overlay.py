from __future__ import annotations

import ast
import hashlib
import json
import locale
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.patchset import overlay as overlay_module
from scripts.patchset.overlay import (
    Scope,
    build_record,
    files_record,
    imported_by_hooks,
    imported_modules,
    module_path,
    needed_scope,
    overlay_files,
    provenance,
    scope_of,
    stamp,
    stamp_all,
    uses,
)
from scripts.patchset.patch import Patch, apply_patches
from scripts.patchset.series import carried_releases, load_series
from scripts.project import OVERLAY, ROOT
from scripts.system.errors import CheckFailedError
from scripts.system.process import run
from tests.scripts import toys
from tests.scripts.repos import write

CORE = [
    "vllm_overlay/__init__.py",
    "vllm_overlay/__main__.py",
    "vllm_overlay/provenance/__init__.py",
]


def hook(tmp_path: Path, added: str, fix_id: str = "1") -> Patch:
    """Return a patch that adds these lines to the worker."""
    after = {toys.WORKER: toys.changed(toys.WORKER, ("import os\n", f"import os\n{added}"))}
    return toys.patch(tmp_path, toys.fix(fix_id), after)


@pytest.fixture
def of_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], Patch]:
    """Return what makes a patch of a worker that has some imports already."""
    files = dict(toys.FILES)

    def make(there: str, old: str, new: str) -> Patch:
        before = toys.changed(toys.WORKER, ("import os\n", f"import os\n{there}"), files=files)
        monkeypatch.setitem(toys.FILES, toys.WORKER, before)
        after = {toys.WORKER: toys.changed(toys.WORKER, (old, new))}
        return toys.patch(tmp_path, toys.fix("1"), after)

    return make


@pytest.fixture
def in_ascii() -> Iterator[None]:
    """Have text be ASCII to the system, as it may be where no locale is set."""
    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")
    yield
    locale.setlocale(locale.LC_CTYPE, before)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a small overlay in place of the repository's own."""
    root = tmp_path / "root"
    write(root, {
        "vllm_overlay/__init__.py": "def fixes(): ...\n",
        "vllm_overlay/__main__.py": "import vllm_overlay\n",
        "vllm_overlay/provenance/__init__.py": "",
        "vllm_overlay/a/__init__.py": "",
        "vllm_overlay/a/one.py": "from vllm_overlay.a import two\nimport vllm.x\n",
        "vllm_overlay/a/two.py": "def f():\n    import vllm_overlay.b.three as t\n    return t\n",
        "vllm_overlay/a/unused.py": "",
        "vllm_overlay/b/__init__.py": "",
        "vllm_overlay/b/three.py": "from vllm_overlay.a.one import name\n",
        "vllm_overlay/c/__init__.py": "MEMBER = 'é'\n",
        "vllm_overlay/c/d/__init__.py": "",
        "tests/one.py": "",
    })  # fmt: skip
    monkeypatch.setattr(overlay_module, "ROOT", root)
    monkeypatch.setattr(overlay_module, "OVERLAY", root / "vllm_overlay")
    return root


def test_an_import_is_found_in_every_block() -> None:
    source = """
class C:
    async def f(self):
        import in_method
if (g := lambda: 1)():
    import in_if
elif x:
    import in_elif
else:
    import in_else
try:
    import in_try
except E:
    import in_except
else:
    import in_try_else
finally:
    import in_finally
for x in y:
    import in_for
else:
    with a as b:
        import in_with
while x:
    match x:
        case 1:
            import in_case
"""
    tree = ast.parse(source)
    names = [n.names[0].name for n in ast.walk(tree) if isinstance(n, ast.Import)]
    assert len(names) == source.count("import ")
    assert sorted(imported_modules(tree)) == sorted(names)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import a, b.c as d", ["a", "b.c"]),
        ("from a.b import c, d as e", ["a.b", "a.b.c", "a.b.d"]),
        ("from . import a", []),
    ],
)
def test_what_is_imported_from_a_module_may_be_one(source: str, names: list[str]) -> None:
    assert imported_modules(ast.parse(source)) == names


WHOLE = ["a/__init__.py", "a/one.py", "a/two.py", "b/__init__.py", "b/three.py"]


class TestClosure:
    @pytest.mark.parametrize(
        ("added", "found"),
        [
            ("", []),
            ("import json\nfrom os import path\n", []),
            ("import vllm_overlay.a.one\n", WHOLE),
            ("from vllm_overlay.a import one as o\n", WHOLE),
            ("from vllm_overlay.a.one import name\n", WHOLE),
            ("from vllm_overlay.a.one import (\n    name,\n    other,\n)\n", WHOLE),
            ("from vllm_overlay.a.one import (  # noqa\n    name,  # (why)\n)\nimport re\n", WHOLE),
            ("import json, vllm_overlay.a.unused\n", ["a/__init__.py", "a/unused.py"]),
            ("    from vllm_overlay.a.unused import x\n", ["a/__init__.py", "a/unused.py"]),
            (
                "from vllm_overlay.a import \\\n    unused\nf(x, y\n",
                ["a/__init__.py", "a/unused.py"],
            ),
            ("import vllm_overlay.c.d\n", ["c/__init__.py", "c/d/__init__.py"]),
            ("from vllm_overlay import fixes\n", []),
        ],
    )
    def test_has_what_the_hooks_reach_and_no_more(
        self, modules: Path, tmp_path: Path, added: str, found: list[str]
    ) -> None:
        files = overlay_files([hook(tmp_path, added)] if added else [])
        assert sorted(files) == sorted([*CORE, *(f"vllm_overlay/{name}" for name in found)])
        assert all(data == (modules / name).read_bytes() for name, data in files.items())

    @pytest.mark.parametrize(
        ("added", "missing"),
        [
            ("import vllm_overlay.a.gone\n", "vllm_overlay.a.gone"),
            ("import vllm_overlay.gone.one\n", "vllm_overlay.gone"),
            ("from vllm_overlay.gone import name\n", "vllm_overlay.gone"),
            ("from vllm_overlay.a.one.gone import name\n", "vllm_overlay.a.one.gone"),
            ("from vllm_overlay import fix\n", "vllm_overlay.fix"),  # it has `fixes`
            ("from vllm_overlay import ixes\n", "vllm_overlay.ixes"),
        ],
    )
    def test_is_refused_where_an_import_has_no_file(
        self, modules: Path, tmp_path: Path, added: str, missing: str
    ) -> None:
        file = missing.replace(".", "/") + ".py"
        said = f"{missing} is imported, and there is no {file}"
        with pytest.raises(CheckFailedError, match=f"^{re.escape(said)}$"):
            overlay_files([hook(tmp_path, added)])

    @pytest.mark.usefixtures("modules", "in_ascii")
    def test_knows_the_members_of_a_package_in_every_locale(self, tmp_path: Path) -> None:
        files = overlay_files([hook(tmp_path, "from vllm_overlay.c import MEMBER\n")])
        assert sorted(files) == sorted([*CORE, "vllm_overlay/c/__init__.py"])

    def test_a_name_put_into_an_import_that_is_there(
        self, modules: Path, of_imports: Callable[[str, str, str], Patch]
    ) -> None:
        """A fix that stands on another one: it uses the module as well."""
        there = (
            "from vllm_overlay.a.unused import (\n    a,\n)\nfrom vllm_overlay.b.three import x\n"
        )
        patch = of_imports(there, "    a,\n", "    b,\n")
        module = "vllm_overlay.a.unused"
        assert imported_by_hooks(patch) == [module, f"{module}.b"]

    def test_an_import_that_goes_on_below_the_hunk(
        self, of_imports: Callable[[str, str, str], Patch]
    ) -> None:
        """What is seen of it counts where a line of it is added, and else nothing."""
        there = "from vllm_overlay.a import (\n    a,\n    b,\n    c,\n    d,\n    e,\n)\n"
        patch = of_imports(there, "    a,\n", "    z,\n")
        assert imported_by_hooks(patch) == [
            "vllm_overlay.a", *(f"vllm_overlay.a.{name}" for name in "zbcd"),
        ]  # fmt: skip
        patch = of_imports(there, "import os\n", "import os\nimport re\n")
        assert imported_by_hooks(patch) == ["re"]

    @pytest.mark.parametrize("added", ["\nx = 1\n", "# why\nx = 1\n", "f(\n    x\n)\n"])
    def test_a_line_that_stands_in_any_import_makes_none_that_is_there_its_own(
        self, of_imports: Callable[[str, str, str], Patch], added: str
    ) -> None:
        there = "from vllm_overlay.a import (one,\n\n)\n"
        patch = of_imports(there, "import os\n", f"import os\n{added}")
        assert there in "".join(patch.files[toys.WORKER][0].new)
        assert imported_by_hooks(patch) == []

    def test_finds_modules_and_packages(self, modules: Path) -> None:
        assert module_path("vllm_overlay.a.one") == modules / "vllm_overlay/a/one.py"
        assert module_path("vllm_overlay.a") == modules / "vllm_overlay/a/__init__.py"
        assert module_path("vllm_overlay.a.one.name") is None
        assert module_path("vllm.a") is None
        assert module_path("tests.one") is None

    @pytest.mark.parametrize("release", carried_releases())
    def test_of_this_repository_finds_each_import_of_its_hooks(self, release: str) -> None:
        for patch in load_series(release).patches:
            files = overlay_files([patch])
            text = "".join("".join(h.added) for hunks in patch.files.values() for h in hunks)
            named = [name for name in imported_by_hooks(patch) if name.startswith("vllm_overlay")]
            assert named or "vllm_overlay" not in text
            for name in named:
                parent = name.rpartition(".")[0]
                assert module_path(name) or module_path(parent), name
            for name, data in files.items():
                assert data == (ROOT / name).read_bytes()
                ast.parse(data)


class TestUses:
    def test_are_of_all_that_a_hook_reaches_on_each_release(
        self, modules: Path, tmp_path: Path
    ) -> None:
        unused = hook(tmp_path, "import vllm_overlay.a.unused\n", "1")
        too = hook(tmp_path, "from vllm_overlay.a import unused\n", "2")
        three = hook(tmp_path, "import vllm_overlay.b.three\n", "3")
        found = uses({"0.18.0": [unused], "0.20.2": [too, unused], "0.22.1": [three]})
        assert {path.relative_to(modules).as_posix(): used for path, used in found.items()} == {
            "vllm_overlay/a/one.py": {"0.22.1": ["3"]},
            "vllm_overlay/a/two.py": {"0.22.1": ["3"]},
            "vllm_overlay/a/unused.py": {"0.18.0": ["1"], "0.20.2": ["2", "1"]},
            "vllm_overlay/b/three.py": {"0.22.1": ["3"]},
        }
        assert list(found) == sorted(found)

    def test_are_none_of_a_module_that_no_hook_reaches(self, modules: Path) -> None:
        found = uses({"0.18.0": []})
        assert modules / "vllm_overlay/a/one.py" in found
        assert not any(found.values())


class TestStamp:
    TEXT = "# SPDX\n# of the project\nimport os\n# x\n"

    def test_stands_below_the_comments_at_the_top(self) -> None:
        lines = stamp(self.TEXT, ["1", "K2"]).splitlines()
        assert lines[:2] == ["# SPDX", "# of the project"]
        assert lines[2] == "# Modified by vllm-kvfix (Apache-2.0, section 4(b)): 1, K2"
        assert lines[3:] == ["import os", "# x"]

    def test_of_a_file_names_the_fixes_that_change_it(self, tmp_path: Path) -> None:
        series = toys.series(tmp_path)
        texts, _ = apply_patches(series.patches, toys.FILES.__getitem__)
        stamped = stamp_all(texts, iter(series.patches))
        assert stamped[toys.WORKER].splitlines()[2].endswith(": 1, 2")
        assert stamped[toys.STATE].splitlines()[0].endswith(": 1")
        assert stamped.keys() == {toys.WORKER, toys.STATE}

    @given(
        st.lists(
            st.sampled_from(["# a\n", "#!/x\n", "x = 1\n", "\n", '"""d"""\n', "# \fb\n", "# c\r\n"])
        ).map("".join),
        st.sampled_from(["", "# no newline", "x = 1"]),
    )
    def test_is_there_once_and_can_be_taken_out_again(self, text: str, last: str) -> None:
        once = stamp(text + last, ["1"])
        assert stamp(once, ["1"]) == once
        assert stamp(stamp(text + last, ["2", "3"]), ["1"]) == once
        notice = "# Modified by vllm-kvfix (Apache-2.0, section 4(b)): 1\n"
        assert once.count(notice) == 1
        assert f"\n{notice}" in f"\n{once}"
        assert once.replace(notice, "", 1) in (text + last, text + last + "\n")


class TestProvenance:
    def test_is_python_that_says_what_the_registry_says(self) -> None:
        fix = toys.fix("K7", title="a 'quoted' → \"title\"\\", depends_on=("1",), kind="companion")
        name, data = provenance(fix)
        assert name == "vllm_overlay/provenance/fix_k7.py"
        scope: dict[str, object] = {}
        exec(compile(data, name, "exec"), scope)  # noqa: S102
        assert scope["FIX"] == {
            "id": "K7",
            "title": fix.title,
            "kind": "companion",
            "upstream_pr": fix.upstream_pr,
            "depends_on": ["1"],
            "tests": list(fix.tests),
        }

    def test_of_a_build_keeps_what_it_is_given_in_its_order(self) -> None:
        values = {"release": "0.20.2", "patch_set": "0.1.0"}
        name, data = build_record(values)
        assert name == "vllm_overlay/provenance/build.py"
        scope: dict[str, dict[str, str]] = {}
        exec(compile(data, name, "exec"), scope)  # noqa: S102
        assert [*scope["BUILD"].items()] == [*values.items()]

    def test_of_files_has_the_sha256_of_each(self) -> None:
        name, data = files_record({"vllm/z.py": b"z", "vllm/a.py": b""})
        assert name == "vllm_overlay/provenance/files.py"
        scope: dict[str, dict[str, str]] = {}
        exec(compile(data, name, "exec"), scope)  # noqa: S102
        assert [*scope["FILES"].items()] == [
            ("vllm/a.py", hashlib.sha256(b"").hexdigest()),
            ("vllm/z.py", hashlib.sha256(b"z").hexdigest()),
        ]

    @pytest.mark.parametrize(("columns", "lines"), [(96, 1), (97, 2)])
    def test_lines_are_broken_where_they_would_be_longer(self, columns: int, lines: int) -> None:
        long = "x" * (columns - len(" 'tests': ['', 'y']}"))
        text = provenance(toys.fix("1", tests=(long, "y")))[1].decode()
        assert text[text.index(" 'tests'") :].count("\n") == lines

    def test_lines_are_short_enough_to_read(self) -> None:
        text = provenance(toys.fix("1", tests=tuple(f"tests/{n}.py" for n in range(20))))[1]
        assert max(map(len, text.decode().splitlines())) <= 100


class TestCommand:
    """`python -m vllm_overlay` on what a wheel would hold."""

    @pytest.fixture
    def site(self, tmp_path: Path) -> Path:
        series = toys.series(tmp_path)
        files = overlay_files(series.patches)
        files.update(map(provenance, toys.REGISTRY.fixes.values()))
        site = tmp_path / "site"
        write(site, files)
        return site

    @staticmethod
    def said(site: Path, *words: str) -> str:
        code = f"import sys, runpy; sys.path.insert(0, {str(site)!r}); "
        code += "runpy.run_module('vllm_overlay', run_name='__main__', alter_sys=True)"
        return run([sys.executable, "-I", "-c", code, *words]).stdout

    def test_prints_a_table(self, site: Path) -> None:
        write(site, dict([build_record({"release": "0.20.2", "patch_set": "0.1.0"})]))
        assert self.said(site).splitlines() == [
            "release: 0.20.2",
            "patch_set: 0.1.0",
            "fix  upstream             what is true with it",
            "1    vllm-project/vllm#1  1 is right → for good",
            "2    -                    2 is right → for good",
        ]

    def test_prints_json(self, site: Path) -> None:
        document = json.loads(self.said(site, "--json"))
        assert document["build"] == {}
        assert [fix["id"] for fix in document["fixes"]] == ["1", "2"]
        assert document["fixes"][1]["depends_on"] == ["1"]

    def test_needs_nothing_of_vllm(self, site: Path) -> None:
        assert not (site / "vllm").exists()
        command = f"import sys; sys.path.insert(0, {str(site)!r}); import vllm_overlay as v; "
        code = command + "print(len(v.fixes()), v.build(), 'vllm' in sys.modules)"
        assert run([sys.executable, "-I", "-c", code]).stdout == "2 {} False\n"


def test_every_module_of_the_overlay_can_be_found_by_its_name() -> None:
    for path in OVERLAY.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        assert module_path(name) == path


CARRIED = ["0.18.0", "0.20.2", "0.22.1", "0.33.0"]


def scope(tmp_path: Path, line: str) -> Scope:
    """Return what a module says whose first line this is."""
    path = tmp_path / "module.py"
    path.write_text(f'# A licence.\n"""{line}\n\nMore.\n"""\n')
    said = scope_of(path)
    assert said is not None and said.about == "what it holds."
    return said


@pytest.mark.parametrize(
    ("words", "held"),
    [
        ("All releases", CARRIED),
        ("From 0.24.0 on", ["0.33.0"]),
        ("From 0.20.2 on", ["0.20.2", "0.22.1", "0.33.0"]),
        ("Up to 0.29.0", ["0.18.0", "0.20.2", "0.22.1"]),
        ("0.19.0 to 0.22.1", ["0.20.2", "0.22.1"]),
    ],
)
class TestScope:
    def test_bounds_are_where_upstream_changes(
        self, tmp_path: Path, words: str, held: list[str]
    ) -> None:
        said = scope(tmp_path, f"{words}: what it holds.")
        assert [each for each in CARRIED if said.holds(each)] == held
        assert needed_scope(said, held, CARRIED) is said

    def test_what_the_hooks_reach_decides(
        self, tmp_path: Path, words: str, held: list[str]
    ) -> None:
        said = scope(tmp_path, f"{words}: what it holds.")
        for needing, made in (
            (CARRIED, "All releases"),
            (CARRIED[:2], "Up to 0.20.2"),
            (CARRIED[:3], "Up to 0.22.1"),
            (CARRIED[2:], "From 0.22.1 on"),
            (CARRIED[1:3], "0.20.2 to 0.22.1"),
        ):
            found = needed_scope(said, needing, CARRIED)
            assert found.words == (words if needing == held else made)
            assert [each for each in CARRIED if found.holds(each)] == needing
            assert found.about == said.about


@pytest.mark.parametrize(
    "line", ["", "What it holds.", "All releases", "All releases:", "Since 0.20.0: x", "Up to x: x"]
)
def test_a_first_line_that_does_not_say(tmp_path: Path, line: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(f'"""{line}"""\n')
    assert scope_of(path) is None


def test_a_module_without_a_docstring_does_not_say(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("x = 1\n")
    assert scope_of(path) is None


def test_a_module_that_nothing_needs_keeps_its_scope(tmp_path: Path) -> None:
    said = scope(tmp_path, "Up to 0.20.2: what it holds.")
    assert needed_scope(said, [], CARRIED) is said
