"""What lies in deploy/ says what is so: names, versions, and Kubernetes' own schemas."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from scripts.patchset.target import Target
from scripts.project import PATCHES, ROOT, project, read_toml
from scripts.ship.installer import installer_name
from scripts.upstream.lock import locked_release
from tests.scripts.repos import write

DEPLOY = ROOT / "deploy"
MANIFEST: list[dict[str, Any]] = [*yaml.safe_load_all((DEPLOY / "pd.yaml").read_text())]
RELEASE = project().default_release


def container(name: str) -> dict[str, Any]:
    """Return the container of a deployment."""
    (found,) = (
        one for one in MANIFEST if (one["kind"], one["metadata"]["name"]) == ("Deployment", name)
    )
    only: dict[str, Any]
    (only,) = found["spec"]["template"]["spec"]["containers"]
    return only


@pytest.mark.parametrize(
    "item", MANIFEST, ids=lambda one: f"{one['kind']} {one['metadata']['name']}"
)
def test_kubernetes_takes_the_manifest(item: dict[str, Any]) -> None:
    kubernetes_validate.validate(item, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_an_engine_has_what_the_fixes_need(name: str) -> None:
    engine = container(name)
    settings = MANIFEST[0]["data"]
    transfer = json.loads(settings["KV_TRANSFER"])
    assert transfer["kv_connector"] == "NixlConnector"
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert "$(KV_TRANSFER)" in engine["command"]
    values = {one["name"]: one for one in engine["env"]}
    address = {"fieldRef": {"fieldPath": "status.podIP"}}
    assert values["VLLM_NIXL_SIDE_CHANNEL_HOST"]["valueFrom"] == address
    # Prometheus makes a target of each port that is declared, and a scrape is no handshake.
    assert int(values["VLLM_NIXL_SIDE_CHANNEL_PORT"]["value"]) == 5600
    assert [one["name"] for one in engine["ports"]] == ["http"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert engine[probe]["httpGet"]["path"] == "/health"


def test_only_engines_reach_an_engine_but_for_its_api() -> None:
    (policy,) = [one["spec"] for one in MANIFEST if one["kind"] == "NetworkPolicy"]
    among_themselves, api = policy["ingress"]
    assert among_themselves == {"from": [{"podSelector": policy["podSelector"]}]}
    assert api == {"ports": [{"port": "http"}]}
    (engines,) = policy["podSelector"]["matchExpressions"]
    assert engines == {"key": "app", "operator": "In", "values": ["prefill", "decode"]}


def test_both_engines_are_set_up_alike() -> None:
    assert container("prefill") == container("decode")


def test_images_are_those_that_are_built_here() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    assert f"ARG BASE=vllm/vllm-openai:v{RELEASE}\n" in text
    assert installer_name(Target.named(RELEASE)) in text
    (tag,) = re.findall(r"-t (\S+)", text)
    assert container("prefill")["image"] == tag == f"vllm-kvfix:{RELEASE}"


@pytest.mark.parametrize(
    ("file", "product", "tag"),
    [("dynamo", "Dynamo 1.2", ":1.2.0"), ("llm-d", "llm-d 0.8", ":v0.8.0")],
)
def test_an_image_of_others_gets_the_fixes_of_its_release(
    file: str, product: str, tag: str
) -> None:
    text = (DEPLOY / f"Containerfile.{file}").read_text()
    (release,) = (
        pin["release"]
        for pin in read_toml(PATCHES / "pins.toml")["pin"]
        if pin["product"] == product
    )
    assert f"nox -s apply -- {release} --layer" in text
    assert re.findall(r"INSTALLER=(\S+)", text) == [installer_name(Target.named(release))]
    bases = re.findall(r"BASE=(\S+)", text)
    assert len({*bases}) == 1 < len(bases)
    assert bases[0].endswith(tag)
    if wheels := re.findall(r"WHEEL=(\S+)", text):
        assert wheels == [locked_release(release).wheel_for("x86_64").name]
    assert re.findall(r"^USER (\S+)$", text, re.M) == [
        "root",
        {"dynamo": "dynamo"}.get(file, "2000"),
    ]


def test_a_checkout_of_other_sources_stops_the_build(tmp_path: Path) -> None:
    text = (DEPLOY / "Containerfile.llm-d").read_text().replace("\\\n", "")
    (comparison,) = re.findall(r"find vllm .*? \+(?= && )", text)
    both = {"vllm/a.py": "A = 1\n", "vllm/b/c d.py": "B = 1\n", "vllm/b.so": "x"}
    write(tmp_path / "site", {**both, "vllm/generated.py": "", "vllm/_version.py": "1"})
    write(tmp_path / "checkout", {**both, "vllm/_version.py": "1.dev", "vllm/b.so": "y"})

    def compared() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", comparison],
            cwd=tmp_path / "site",
            env={**os.environ, "CHECKOUT": str(tmp_path / "checkout")},
            capture_output=True,
            text=True,
        )

    assert (compared().returncode, compared().stdout) == (0, "")
    write(tmp_path / "checkout", {"vllm/a.py": "A = 2\n", "vllm/b/c d.py": "B = 1\n# more\n"})
    found = compared()
    assert found.returncode == 1
    assert "vllm/a.py" in found.stdout + found.stderr
    assert "vllm/b/c d.py" in found.stdout + found.stderr


def test_the_router_is_the_one_that_was_run() -> None:
    (pinned,) = read_toml(ROOT / "pyproject.toml")["dependency-groups"]["pd-tests"]
    assert pinned in (DEPLOY / "Containerfile.router").read_text()
    assert container("router")["image"] == pinned.replace("==", ":")
