from __future__ import annotations

import textwrap

import pytest

from scripts.patchset.hooks import added_lines, logic_in_hooks

BEFORE = """\
import os


class Worker(Base):
    size: int

    def read(self, req, meta):
        if not meta:
            return None
        for rank in req.ranks:
            if rank in meta:
                self.send(rank, meta)
        result = self.load(
            req,
            meta,
        )
        return result

    async def serve(self, request):
        return await self.run(request)
"""


def changed(old: str, new: str) -> str:
    assert BEFORE.count(old) == 1, old
    return BEFORE.replace(old, new)


ALLOWED = {
    "an import": ("import os\n", "import os\nimport vllm_overlay.worker\n"),
    "an import from": ("import os\n", "import os\nfrom vllm_overlay import worker\n"),
    "an import over several lines": (
        "import os\n",
        "import os\nfrom vllm_overlay.worker import (\n    one,\n    two,\n)\n",
    ),
    "a base": ("class Worker(Base):", "class Worker(Reads, Base):"),
    "bases over several lines": ("class Worker(Base):", "class Worker(\n    Reads,\n    Base,\n):"),
    "a field": ("    size: int\n", "    size: int\n    abort_immediately: bool = False\n"),
    "a decorator": ("    def read", "    @guarded\n    def read"),
    "a decorator of a coroutine": ("    async def", "    @with_cleanup(1)\n    async def"),
    "a decorator of a class": ("class Worker", "@patched\nclass Worker"),
    "a call": ("        for rank", "        check(req, self.size)\n        for rank"),
    "a call over several lines": (
        "        for rank",
        "        check(\n            req,\n            meta=meta,\n        )\n        for rank",
    ),
    "an awaited call": (
        "        return await",
        "        await check(request)\n        return await",
    ),
    "a returned call": ("        return result", "        return checked(result)"),
    "an assigned call": (
        "        return result",
        "        result = checked(result)\n        return result",
    ),
    "a call of ours with upstream's arguments": (
        "        result = self.load(\n            req,\n            meta,\n        )",
        "        result = load(\n            self,\n            req,\n            meta,\n        )",
    ),
    "a call in upstream's expression": ("self.send(rank, meta)", "self.send(rank, remote(meta))"),
    "an argument of upstream's call": (
        "            meta,\n",
        "            meta,\n            req.id,\n",
    ),
    "a keyword of upstream's call": (
        "            meta,\n",
        "            meta,\n            id=req.id,\n",
    ),
    "a call that leaves": (
        "                self.send",
        "                if skips(rank):\n                    continue\n                self.send",
    ),
    "a call that ends a loop": (
        "                self.send",
        "                if is_over(rank):\n                    break\n                self.send",
    ),
    "a negated call that returns": (
        "        for rank",
        "        if not wanted(req):\n            return\n        for rank",
    ),
    "a call that returns several constants": (
        "        for rank",
        "        if nothing(req):\n            return False, None\n        for rank",
    ),
    "a removal": ("        if not meta:\n            return None\n", ""),
    "an empty line": ("import os\n", "import os\n\n"),
}

REFUSED = {
    "a comparison": ("        for rank", "        check(req.size > 1)\n        for rank"),
    "arithmetic": ("        for rank", "        n = count(req) + 1\n        for rank"),
    "a plain assignment": ("        for rank", "        self.size = 1\n        for rank"),
    "a rebinding from afar": ("import os\n", "import os\nos.read = read\n"),
    "a lambda": ("        for rank", "        check(lambda: req)\n        for rank"),
    "a conditional value": (
        "        return result",
        "        return f(result) if result else None",
    ),
    "a condition on a name": (
        "        for rank",
        "        if req:\n            return\n        for rank",
    ),
    "a condition of two parts": (
        "        for rank",
        "        if wanted(req) and req.size:\n            return\n        for rank",
    ),
    "work behind a call": (
        "        for rank",
        "        if wanted(req):\n            self.size += 1\n        for rank",
    ),
    "a sum among what is returned": (
        "        for rank",
        "        if nothing(req):\n            return 0, req.size + 1\n        for rank",
    ),
    "an else": (
        "        for rank",
        "        if wanted(req):\n            return\n        else:\n            f()\n"
        "        for rank",
    ),
    "a loop": (
        "        return result",
        "        for x in f():\n            g(x)\n        return result",
    ),
    "a comprehension": ("        return result", "        return f([x for x in result])"),
    "a try": (
        "        return result",
        "        try:\n            f()\n        except OSError:\n            g()\n"
        "        return result",
    ),
    "a with": (
        "        return result",
        "        with f():\n            pass\n        return result",
    ),
    "a decorator twice": ("    def read", "    @guarded\n    @guarded\n    def read"),
    "a function": ("import os\n", "import os\n\n\ndef helper():\n    return 1\n"),
    "a method": ("    def read", "    def helper(self):\n        return 1\n\n    def read"),
    "a class": ("import os\n", "import os\n\n\nclass More:\n    pass\n"),
    "a field with a computed value": (
        "    size: int\n",
        "    size: int\n    more: int = compute()\n",
    ),
    "a class attribute": ("    size: int\n", "    size: int\n    more = 1\n"),
    "a deletion": ("        return result", "        del self.size\n        return result"),
    "an assertion": ("        return result", "        assert result\n        return result"),
    "a raise": ("        return result", "        raise ValueError(result)"),
    "a comment": ("        return result", "        # because\n        return result"),
    "a docstring": ("    size: int\n", '    """Words."""\n\n    size: int\n'),
    "another parameter": ("def read(self, req, meta)", "def read(self, req, meta, more)"),
    "another condition of upstream's": ("if not meta:", "if not meta or not req:"),
    "another loop of upstream's": ("in req.ranks:", "in req.ranks[1:]:"),
    "another constant": ("            return None", "            return 1"),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_a_hook_may_add(name: str) -> None:
    after = changed(*ALLOWED[name])
    assert logic_in_hooks(BEFORE, after) == []


@pytest.mark.parametrize("name", REFUSED)
def test_a_hook_may_not_add(name: str) -> None:
    after = changed(*REFUSED[name])
    found = logic_in_hooks(BEFORE, after)
    assert found
    lines = after.splitlines()
    for number, text in found:
        assert lines[number - 1].strip() == text
        assert number in added_lines(BEFORE, after)


def test_upstreams_own_logic_is_not_looked_at() -> None:
    assert logic_in_hooks("", "") == []
    assert logic_in_hooks(BEFORE, BEFORE) == []


def test_lines_are_those_of_the_new_text() -> None:
    before = "a\nb\nc\n"
    assert added_lines(before, "x\na\nb\ny\nc\nz\n") == {1, 4, 6}
    assert added_lines(before, "a\nB\nc\n") == {2}
    assert added_lines(before, "c\n") == set()


def test_each_line_of_logic_is_named() -> None:
    after = textwrap.dedent("""\
        import os
        import json

        def helper(x):
            if x > 1:
                return json.dumps(x)
            return os.path.join(x)
        """)
    assert [number for number, _ in logic_in_hooks("import os\n", after)] == [4, 5]


def test_logic_in_what_is_handed_on_is_upstreams_as_long_as_it_is_not_added() -> None:
    before = "x = self.f(\n    max(0, a - b),\n)\n"
    ours = "x = f(\n    self,\n    max(0, a - b),\n)\n"
    assert logic_in_hooks(before, ours) == []
    assert logic_in_hooks(before, ours.replace("a - b", "a - c")) != []
