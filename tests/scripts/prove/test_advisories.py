"""What scanners read: valid by the formats' own schemas and models, and what the matrix says."""

from __future__ import annotations

import copy
import json
import tarfile
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from packageurl import PackageURL
from packaging.version import Version
from vexipy.document import Document

from scripts.patchset.registry import Fix, Registry, load_registry
from scripts.patchset.series import carried_releases
from scripts.project import ROOT
from scripts.prove.advisories import (
    PREFIX,
    Edition,
    edition,
    openvex,
    osv_records,
    ranges,
)
from scripts.prove.status import HAVING, Cell, State, all_cells, previous_cells
from scripts.system.errors import KvfixError
from scripts.upstream.index import fetch
from scripts.upstream.lock import LockedFile
from scripts.wheel.names import is_patched
from tests.scripts.hostile import registries
from tests.scripts.repos import git, write

# Its sdist holds the schemas that it checks what it gathers by; no package installs them.
VUNNEL = LockedFile(
    "vunnel-0.44.0.tar.gz", "1ebf6013479baba49379b012c6b06808265881b8d962bc708834cfe69d986e27"
)
MODIFIED = "2026-01-31T12:00:00Z"
TOLD = Edition(MODIFIED, 7)
Cells = dict[str, dict[str, Cell]]


def schema(name: str) -> dict[str, Any]:
    with tarfile.open(fetch(VUNNEL, distribution="vunnel")) as tar:
        file = tar.extractfile(f"vunnel-0.44.0/schema/vulnerability/{name}.json")
        assert file is not None
        document: dict[str, Any] = json.load(file)
    return document


def checker(document: dict[str, Any]) -> Draft202012Validator:
    return Draft202012Validator(document, format_checker=Draft202012Validator.FORMAT_CHECKER)


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry()


@pytest.fixture(scope="module")
def cells(registry: Registry) -> Cells:
    return all_cells(registry, previous_cells())


@pytest.fixture(scope="module")
def records(cells: Cells, registry: Registry) -> dict[str, dict[str, Any]]:
    return osv_records(cells, registry, MODIFIED)


@pytest.fixture(scope="module")
def osv_schema() -> dict[str, Any]:
    return schema("osv/schema-1.7.0")


@pytest.fixture(scope="module")
def ours(osv_schema: dict[str, Any]) -> Draft202012Validator:
    """Return OSV's schema with one more home database: this one."""
    document = copy.deepcopy(osv_schema)
    prefix = document["$defs"]["prefix"]
    prefix["pattern"] = prefix["pattern"].replace("^(", f"^({PREFIX}|", 1)
    return checker(document)


@pytest.fixture(scope="module")
def vex_schema() -> Draft202012Validator:
    return checker(schema("annotated-openvex/schema-1.0.0"))


def shown(state: State, proven: bool = True) -> Cell:
    return Cell(state, proven, ("seen",), "nox -s status", True, "key")


def everywhere(registry: Registry, state: State, proven: bool = True) -> Cells:
    return {
        release: dict.fromkeys(registry.fixes, shown(state, proven))
        for release in carried_releases()
    }


def statuses(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the statements by id and version."""
    return {
        (one["vulnerability"]["name"], str(PackageURL.from_string(product["@id"]).version)): one
        for one in document["statements"]
        for product in one["products"]
    }


def in_ranges(release: str, record: dict[str, Any]) -> bool:
    """Evaluate the events as OSV says."""
    version, hit = Version(release), False
    for one in record["affected"][0]["ranges"]:
        inside = False
        for event in one["events"]:
            ((kind, at),) = event.items()
            if kind == "introduced" and version >= Version(at):
                inside = True
            elif (kind == "fixed" and version >= Version(at)) or (
                kind == "last_affected" and version > Version(at)
            ):
                inside = False
        hit = hit or inside
    return hit


class TestOsv:
    def test_every_record_is_valid(
        self, records: dict[str, dict[str, Any]], ours: Draft202012Validator
    ) -> None:
        assert records
        for name, record in records.items():
            assert not [*ours.iter_errors(record)], name

    def test_the_schema_itself_objects_to_the_ids_alone(
        self, records: dict[str, dict[str, Any]], osv_schema: dict[str, Any]
    ) -> None:
        for record in records.values():
            (error,) = checker(osv_schema).iter_errors(record)
            assert [*error.path] == ["id"]

    @pytest.mark.parametrize(
        "wrong",
        [
            {"modified": "yesterday"},
            {"id": "OURS-1"},
            {"affected": [{"package": {"ecosystem": "PyPy", "name": "vllm"}}]},
            {"references": [{"type": "PULL", "url": "https://example.org"}]},
            {"headline": "x"},
        ],
    )
    def test_what_is_wrong_is_not_valid(
        self,
        records: dict[str, dict[str, Any]],
        ours: Draft202012Validator,
        wrong: dict[str, Any],
    ) -> None:
        assert not ours.is_valid({**records["KVFIX-K01"], **wrong})

    def test_each_release_is_affected_as_the_matrix_says(
        self, records: dict[str, dict[str, Any]], cells: Cells, registry: Registry
    ) -> None:
        assert {*records} == {f"KVFIX-{fix_id}" for fix_id in registry.fixes} - {"KVFIX-K00"}
        for fix_id in registry.fixes.keys() - {"K00"}:
            having = [release for release in cells if cells[release][fix_id].state in HAVING]
            record = records[f"KVFIX-{fix_id}"]
            assert record["affected"][0]["versions"] == having
            assert [release for release in cells if in_ranges(release, record)] == having

    def test_a_record_says_what_the_registry_says(
        self, records: dict[str, dict[str, Any]], registry: Registry
    ) -> None:
        fix, record = registry.fixes["40449"], records["KVFIX-40449"]
        assert record["summary"] == fix.headline
        assert record["references"] == [{"type": "FIX", "url": fix.upstream_url}]
        assert record["affected"][0]["ranges"] == [
            {"type": "ECOSYSTEM", "events": [{"introduced": "0.18.0"}, {"fixed": "0.21.0"}]}
        ]
        (without, *_) = (
            f.id for f in registry.fixes.values() if not f.upstream_pr and f.id != "K00"
        )
        assert "references" not in records[f"KVFIX-{without}"]

    def test_a_defect_of_no_release_has_no_record(self, registry: Registry) -> None:
        assert osv_records(everywhere(registry, State.NOT_AFFECTED), registry, MODIFIED) == {}

    @given(st.lists(st.sampled_from(State), min_size=1, max_size=12))
    def test_ranges_hold_the_releases_that_have_it_and_no_others(self, states: list[State]) -> None:
        row = {f"0.{minor}.0": state for minor, state in enumerate(states)}
        record = {"affected": [{"ranges": [{"events": one} for one in ranges(row)]}]}
        having = [release for release, state in row.items() if state in HAVING]
        assert [release for release in row if in_ranges(release, record)] == having

    @settings(
        max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(st.integers(0, 1 << 32), st.sampled_from(State), st.booleans())
    def test_a_registry_that_is_taken_gives_valid_records(
        self,
        tmp_path: Path,
        ours: Draft202012Validator,
        vex_schema: Draft202012Validator,
        seed: int,
        state: State,
        proven: bool,
    ) -> None:
        path = tmp_path / "fixes.toml"
        path.write_bytes(registries.hostile(Random(seed)))  # noqa: S311
        try:
            read = load_registry(path)
        except KvfixError:
            return
        told = {
            fix_id: replace(fix, security="end it", security_action=fix.fixed_in)
            for fix_id, fix in read.fixes.items()
        }
        registry = Registry(read.author, told)
        cells = everywhere(registry, state, proven)
        for record in osv_records(cells, registry, MODIFIED).values():
            assert not [*ours.iter_errors(record)]
        if not told:  # OpenVEX has no document without a statement
            return
        document = openvex(cells, registry, carried_releases(), TOLD)
        assert not [*vex_schema.iter_errors({"document": document})]
        Document.from_json(json.dumps(document))


class TestOpenVex:
    def valid(self, document: dict[str, Any], vex_schema: Draft202012Validator) -> None:
        assert not [*vex_schema.iter_errors({"document": document})]
        Document.from_json(json.dumps(document))

    def test_the_document_of_today_is_valid(
        self, cells: Cells, registry: Registry, vex_schema: Draft202012Validator
    ) -> None:
        self.valid(openvex(cells, registry, carried_releases(), TOLD), vex_schema)

    @pytest.mark.parametrize("proven", [True, False])
    @pytest.mark.parametrize("state", State)
    def test_so_is_that_of_every_state(
        self, registry: Registry, vex_schema: Draft202012Validator, state: State, proven: bool
    ) -> None:
        document = openvex(everywhere(registry, state, proven), registry, carried_releases(), TOLD)
        self.valid(document, vex_schema)

    def test_each_build_is_told_of_once_for_each_fix_of_security(
        self, cells: Cells, registry: Registry
    ) -> None:
        document = openvex(cells, registry, carried_releases(), TOLD)
        security = [fix for fix in registry.fixes.values() if fix.security]
        told = [
            (one["vulnerability"]["name"], product["@id"])
            for one in document["statements"]
            for product in one["products"]
        ]
        assert len(told) == len({*told}) == len(security) * len(carried_releases())
        assert all(is_patched(Version(version)) for _, version in statuses(document))

    def test_what_is_proven_is_fixed(self, registry: Registry) -> None:
        said = self.of(registry, State.PATCHED)
        assert said("K03", "0.20.2") == {"status": "fixed"}

    def test_what_the_operator_has_to_do_is_asked_for(self, registry: Registry) -> None:
        said = self.of(registry, State.PATCHED)("K17", "0.20.2")
        assert said["status"] == "affected"
        assert "allowed_peers" in said["action_statement"]

    def test_a_part_without_a_patch_keeps_a_build_affected(self, registry: Registry) -> None:
        said = self.of(registry, State.PATCHED)
        assert said("K04", "0.18.1")["status"] == "affected"
        assert said("K04", "0.20.2") == {"status": "fixed"}

    def test_what_is_not_proven_is_looked_into(self, registry: Registry) -> None:
        for state in (State.PATCHED, State.UPSTREAM, State.NOT_AFFECTED, State.UNPROVEN):
            said = self.of(registry, state, proven=False)("K03", "0.20.2")
            assert said["status"] == "under_investigation"

    def test_a_release_without_the_defect_has_no_vulnerable_code(self, registry: Registry) -> None:
        for state in (State.UPSTREAM, State.NOT_AFFECTED):
            said = self.of(registry, state)("K03", "0.33.0")
            assert said == {
                "status": "not_affected",
                "justification": "vulnerable_code_not_present",
            }

    def test_open_is_affected(self, registry: Registry) -> None:
        assert self.of(registry, State.OPEN)("K03", "0.20.2")["status"] == "affected"

    @staticmethod
    def of(registry: Registry, state: State, proven: bool = True) -> Any:  # noqa: ANN401
        document = openvex(everywhere(registry, state, proven), registry, carried_releases(), TOLD)
        by_version = statuses(document)

        def said(fix_id: str, release: str) -> dict[str, Any]:
            (found,) = (
                one
                for (name, version), one in by_version.items()
                if name == f"KVFIX-{fix_id}" and version.startswith(f"{release}+")
            )
            return {k: v for k, v in found.items() if k not in ("vulnerability", "products")}

        return said

    @pytest.mark.parametrize(
        "wrong", [{"author": 1}, {"version": "first"}, {"statements": [{"status": "fixed"}]}]
    )
    def test_what_is_wrong_is_not_valid(
        self, registry: Registry, wrong: dict[str, Any], vex_schema: Draft202012Validator
    ) -> None:
        document = openvex(everywhere(registry, State.PATCHED), registry, carried_releases(), TOLD)
        document |= wrong
        assert not vex_schema.is_valid({"document": document})
        with pytest.raises(ValueError):
            Document.from_json(json.dumps(document))


class TestEdition:
    def repository(self, folder: Path) -> Path:
        git(folder, "init", "-q")
        return folder

    def commit(self, folder: Path, name: str, date: str) -> None:
        write(folder, {name: date})
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "-m", "x", GIT_COMMITTER_DATE=date)

    def test_is_of_the_last_commit_of_what_is_told(self, tmp_path: Path) -> None:
        folder = self.repository(tmp_path)
        self.commit(folder, "patches/fixes.toml", "2026-01-31T12:00:00+0100")
        self.commit(folder, "README.md", "2026-02-01T12:00:00Z")
        assert edition(folder) == Edition("2026-01-31T11:00:00Z", 1)

    def test_there_is_none_without_a_history(self, tmp_path: Path) -> None:
        assert edition(tmp_path) is None

    def test_nor_with_a_part_of_it(self, tmp_path: Path) -> None:
        (tmp_path / "whole").mkdir()
        folder = self.repository(tmp_path / "whole")
        self.commit(folder, "patches/a", "2026-01-31T12:00:00Z")
        self.commit(folder, "patches/a", "2026-02-01T12:00:00Z")
        git(tmp_path, "clone", "-q", "--depth=1", folder.as_uri(), "part")
        assert edition(tmp_path / "part") is None


def test_the_fixes_of_security_are_those_of_the_page(registry: Registry) -> None:
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    named: list[Fix] = [fix for fix in registry.fixes.values() if f"[{fix.id}](fixes.md" in page]
    assert named == [fix for fix in registry.fixes.values() if fix.security]
