from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from scripts.project import ROOT
from scripts.upstream_tests.models import MODELS, _byte_characters, write_models


def test_a_model_lies_where_the_hub_keeps_it(tmp_path: Path) -> None:
    home = write_models(tmp_path)
    folders = sorted(path.name for path in (home / "hub").iterdir())
    assert folders == sorted(f"models--{name.replace('/', '--')}" for name in MODELS)
    model = home / "hub" / "models--facebook--opt-125m"
    snapshot = model / "snapshots" / (model / "refs" / "main").read_text()
    config = json.loads((snapshot / "config.json").read_text())
    assert (config["model_type"], config["hidden_size"]) == ("opt", 768)
    tokenizer = json.loads((snapshot / "tokenizer.json").read_text())
    assert config["eos_token_id"] == tokenizer["model"]["vocab"]["</s>"]
    assert {path.name for path in snapshot.iterdir()} == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip


def test_dimensions_fit_together() -> None:
    for name, config in MODELS.items():
        heads = config.get("num_attention_heads", config.get("n_head"))
        if heads is None:
            continue
        assert heads % config.get("num_key_value_heads", heads) == 0, name
        assert "head_dim" in config or config.get("hidden_size", 768) % heads == 0, name


def test_each_byte_has_a_character_of_its_own() -> None:
    characters = _byte_characters()
    assert len({*characters}) == 256
    assert characters[ord("A")] == "A"
    assert characters[ord(" ")] == "\u0120"  # as every byte-level vocabulary writes it
    assert characters[ord("\n")] == "\u010a"


def test_it_can_be_written_by_hand(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "scripts.upstream_tests.models", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"HF_HOME={tmp_path}" in result.stdout
    assert (tmp_path / "hub" / "models--openai-community--gpt2").is_dir()
