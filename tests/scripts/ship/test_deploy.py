"""What lies in deploy/ says what is so: names, versions, and Kubernetes' own schemas."""

from __future__ import annotations

import json
import re
from typing import Any

import kubernetes_validate
import pytest
import yaml

from scripts.patchset.target import Target
from scripts.project import ROOT, project, read_toml
from scripts.ship.installer import installer_name

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
    port = int(values["VLLM_NIXL_SIDE_CHANNEL_PORT"]["value"])
    assert port in [one["containerPort"] for one in engine["ports"]]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert engine[probe]["httpGet"]["path"] == "/health"


def test_both_engines_are_set_up_alike() -> None:
    assert container("prefill") == container("decode")


def test_images_are_those_that_are_built_here() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    assert f"ARG BASE=vllm/vllm-openai:v{RELEASE}\n" in text
    assert installer_name(Target.named(RELEASE)) in text
    (tag,) = re.findall(r"-t (\S+)", text)
    assert container("prefill")["image"] == tag == f"vllm-kvfix:{RELEASE}"


def test_the_router_is_the_one_that_was_run() -> None:
    (pinned,) = read_toml(ROOT / "pyproject.toml")["dependency-groups"]["pd-tests"]
    assert pinned in (DEPLOY / "Containerfile.router").read_text()
    assert container("router")["image"] == pinned.replace("==", ":")
