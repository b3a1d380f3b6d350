"""The CycloneDX document inside a patched wheel: what it was made from, and what was fixed.

It lies where PEP 770 puts it, below `sboms/` in the metadata folder. Its serial number comes from
its content and it has no timestamp, so that the same wheel is built twice with the same bytes.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from packaging.utils import canonicalize_name

from scripts.project import OVERLAY
from scripts.system.errors import BrokenWheelError

SBOM_PATH = "sboms/kvfix.cdx.json"  # within the metadata folder
_RELEASE = "kvfix:release"

FixKind = Literal["backport", "unofficial"]  # CycloneDX's words for a patch


@dataclass(frozen=True)
class SbomFix:
    """One fix: `backport` where upstream has it in a later release, `unofficial` where it has not.

    `upstream_pr` is the page of the upstream pull request, None where there is none.
    """

    id: str
    title: str
    upstream_pr: str | None
    kind: FixKind


@dataclass(frozen=True)
class Sbom:
    """What a patched wheel says about itself; `release` is the one whose fixes it has."""

    name: str
    version: str
    release: str
    ancestor_name: str
    ancestor_version: str
    ancestor_sha256: str
    fixes: tuple[SbomFix, ...]


def build_sbom(
    *,
    name: str,
    version: str,
    patch_set: str,
    release: str,
    ancestor_name: str,
    ancestor_version: str,
    ancestor_sha256: str | None,
    fixes: Sequence[SbomFix],
) -> bytes:
    """Return the document as JSON in UTF-8, CycloneDX 1.6, the same for the same arguments.

    Args:
        name: The patched distribution.
        version: Its version.
        patch_set: The version of the patch set, and so of the overlay package inside.
        release: The release whose fixes are inside; a nightly build has a version of its own.
        ancestor_name: The distribution that was patched.
        ancestor_version: Its version.
        ancestor_sha256: Of the wheel that was patched, 64 hexadecimal digits; None where what was
            patched was installed, and from which wheel is not known.
        fixes: The fixes inside. The document lists them in an order of its own.
    """
    # Imported here: the library takes a sixth of a second, and reading a document needs none of it.
    from cyclonedx.model import HashAlgorithm, HashType, Property, XsUri
    from cyclonedx.model.bom import Bom, BomMetaData
    from cyclonedx.model.component import (
        Component,
        ComponentType,
        Patch,
        PatchClassification,
        Pedigree,
    )
    from cyclonedx.model.issue import IssueClassification, IssueType, IssueTypeSource
    from cyclonedx.output.json import JsonV1Dot6
    from packageurl import PackageURL

    def purl(distribution: str, of_version: str) -> PackageURL:
        return PackageURL(type="pypi", name=canonicalize_name(distribution), version=of_version)

    def patch(fix: SbomFix) -> Patch:
        source = None
        if fix.upstream_pr is not None:
            source = IssueTypeSource(name="upstream pull request", url=XsUri(fix.upstream_pr))
        issue = IssueType(type=IssueClassification.DEFECT, id=fix.id, name=fix.title, source=source)
        return Patch(type=PatchClassification(fix.kind), resolves=[issue])

    ancestor = Component(
        type=ComponentType.LIBRARY,
        name=ancestor_name,
        version=ancestor_version,
        purl=purl(ancestor_name, ancestor_version),
        bom_ref=str(purl(ancestor_name, ancestor_version)),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=ancestor_sha256)]
        if ancestor_sha256
        else None,
    )
    overlay = Component(
        type=ComponentType.LIBRARY,
        name=OVERLAY.name,
        version=patch_set,
        bom_ref=OVERLAY.name,
        description="The code of the fixes, called from the patched files",
    )
    patched = Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=version,
        purl=purl(name, version),
        bom_ref=str(purl(name, version)),
        components=[overlay],
        properties=[Property(name=_RELEASE, value=release)],
        pedigree=Pedigree(ancestors=[ancestor], patches=[patch(fix) for fix in fixes]),
    )
    bom = Bom(metadata=BomMetaData(component=patched))
    bom.register_dependency(patched, [overlay])
    document = json.loads(JsonV1Dot6(bom).output_as_string())
    # The library insists on the clock and on a random number here; both are optional in the
    # format.
    del document["metadata"]["timestamp"], document["serialNumber"]
    document["serialNumber"] = uuid.uuid5(uuid.NAMESPACE_OID, _text(document)).urn
    return _text(document).encode("utf-8")


def read_sbom(data: bytes) -> Sbom:
    """Return what a document of `build_sbom` says, fixes in its order.

    Raises:
        BrokenWheelError: It is not such a document.
    """
    try:
        component = json.loads(data)["metadata"]["component"]
        (ancestor,) = component["pedigree"]["ancestors"]
        (digest,) = ancestor["hashes"]
        (release,) = (p["value"] for p in component["properties"] if p["name"] == _RELEASE)
        return Sbom(
            name=component["name"],
            version=component["version"],
            release=release,
            ancestor_name=ancestor["name"],
            ancestor_version=ancestor["version"],
            ancestor_sha256=digest["content"],
            fixes=tuple(_fix(patch) for patch in component["pedigree"].get("patches", ())),
        )
    except (ValueError, LookupError, TypeError) as error:
        raise BrokenWheelError(
            f"{SBOM_PATH} is not as kvfix writes it: {error!r}",
            expected="a component with one ancestor, its hash, and the patches",
            next_step="do not deploy it; build the wheel again with apply",
        ) from error


def _fix(patch: dict[str, Any]) -> SbomFix:
    (issue,) = patch["resolves"]
    source = issue.get("source")
    return SbomFix(issue["id"], issue["name"], source and source["url"], patch["type"])


def _text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
