"""Multi-token prediction under DeepSeek-V3's names: in, out, and against the released definition.

The definition is that of vLLM's ``deepseek_mtp.py``, written here once more around the layers of
transformers: ``eh_proj(cat(enorm(embedding), hnorm(hidden)))``, a decoder layer, ``shared_head``.
vLLM also sets the embedding at position 0 to zero, as it never drafts from there; the paper does
not.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

from convoy.commands import reshard
from pretrain.parallelize.micro_batches import LocalBatch
from pretrain.spec.read import load_spec
from tests.convoy.commands.test_tools import one_error_line
from tests.support.hf import change_tensors, load_ours, make_model, run, tokens, weights_of

CASE, LAYERS, DEPTH = "deepseek_v3", 3, 2


def module_tensors(depth: int) -> dict[str, Tensor]:
    """Random weights of each module: a decoder layer of the same kind as the last, and its own."""
    generator = torch.Generator().manual_seed(7)
    model, found = make_model(CASE), {}
    shared = {"embed_tokens": model.model.embed_tokens, "shared_head.head": model.lm_head}
    for number in range(LAYERS, LAYERS + depth):
        for name, value in model.model.layers[-1].state_dict().items():
            for each, part in split_experts(name, value).items():
                noise = torch.randn(part.shape, generator=generator)
                found[f"model.layers.{number}.{each}"] = part + 0.1 * part.std() * noise
        for name in ("enorm", "hnorm", "shared_head.norm"):
            found[f"model.layers.{number}.{name}.weight"] = 1 + 0.5 * torch.randn(
                32, generator=generator
            )
        projection = torch.randn(32, 64, generator=generator) / 8
        found[f"model.layers.{number}.eh_proj.weight"] = projection
        for name, module in shared.items():
            found[f"model.layers.{number}.{name}.weight"] = module.weight.detach().clone()
    return found


def split_experts(name: str, value: Tensor) -> dict[str, Tensor]:
    """Experts as the files have them: each by itself, gate and up apart."""
    if name == "mlp.experts.gate_up_proj":
        gate, up = value.chunk(2, 1)
        stacks = {"gate_proj": gate, "up_proj": up}
    elif name == "mlp.experts.down_proj":
        stacks = {"down_proj": value}
    else:
        return {name: value.clone()}
    return {
        f"mlp.experts.{e}.{role}.weight": stack[e].clone()
        for role, stack in stacks.items()
        for e in range(len(stack))
    }


def joined(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse, for transformers' layer."""
    kept = {k: v for k, v in values.items() if "mlp.experts." not in k}
    count = sum(k.endswith("down_proj.weight") and "mlp.experts." in k for k in values)
    each = [
        [values[f"mlp.experts.{e}.{role}_proj.weight"] for e in range(count)]
        for role in ("gate", "up", "down")
    ]
    kept["mlp.experts.gate_up_proj"] = torch.cat((torch.stack(each[0]), torch.stack(each[1])), 1)
    kept["mlp.experts.down_proj"] = torch.stack(each[2])
    return kept


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder as DeepSeek's, and what is imported of it."""
    root = tmp_path_factory.mktemp("mtp")
    make_model(CASE).save_pretrained(root / "hf")
    config = json.loads((root / "hf/config.json").read_text())
    config["num_nextn_predict_layers"] = DEPTH
    (root / "hf/config.json").write_text(json.dumps(config))
    change_tensors(root / "hf", module_tensors(DEPTH))
    assert run("import", root / "hf", root / "ours") == 0
    return root


def by_definition(ids: Tensor, later: list[Tensor], values: dict[str, Tensor]) -> list[Tensor]:
    """The logits of each module, from the weights of the files."""
    model = make_model(CASE)
    eps = model.config.rms_norm_eps

    def norm(x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * values[f"{name}.weight"]

    found = []
    hidden = model.model(ids, use_cache=False).last_hidden_state  # after the last norm
    positions = torch.arange(ids.shape[1])[None]
    rotary = model.model.rotary_emb(hidden, positions)
    S = ids.shape[1]
    mask = torch.full((S, S), -torch.inf).triu(1)[None, None]
    for number, after in enumerate(later, start=LAYERS):
        prefix = f"model.layers.{number}"
        embedded = F.embedding(after, values[f"{prefix}.embed_tokens.weight"])
        both = norm(embedded, f"{prefix}.enorm"), norm(hidden, f"{prefix}.hnorm")
        hidden = torch.cat(both, -1) @ values[f"{prefix}.eh_proj.weight"].T
        block = DeepseekV3DecoderLayer(model.config, layer_idx=LAYERS - 1).eval()
        own = {k.removeprefix(f"{prefix}."): v for k, v in values.items() if k.startswith(prefix)}
        rest = ("enorm", "hnorm", "eh_proj", "embed_tokens", "shared_head")
        block.load_state_dict(joined({k: v for k, v in own.items() if not k.startswith(rest)}))
        hidden = block(
            hidden, attention_mask=mask, position_ids=positions, position_embeddings=rotary
        )
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        normed = norm(hidden, f"{prefix}.shared_head.norm")
        found.append(normed @ values[f"{prefix}.shared_head.head.weight"].T)
    return found


def test_logits_are_those_of_the_released_definition(folder: Path):
    ids = tokens()
    decoder = load_ours(folder / "ours/checkpoints")
    inputs, _ = LocalBatch(num_mtp_layers=DEPTH).training_inputs(F.pad(ids, (0, 1)))
    _, *later = inputs.tensor_split(1 + DEPTH)
    with torch.no_grad():
        ours = decoder(inputs, depth=DEPTH).mtp_logits
        theirs = by_definition(ids, later, load_file(folder / "hf/model.safetensors"))
    assert len(ours) == DEPTH
    for mine, expected in zip(ours, theirs, strict=True):
        assert expected.std() > 0.3
        assert (mine - expected).abs().max() < 1e-4


@pytest.mark.parametrize("surgery", ["duplicate=2", "widen=2"])
def test_surgery_changes_the_modules_too(folder: Path, tmp_path: Path, surgery: str):
    source, out = folder / "ours/checkpoints", tmp_path / "out"
    assert reshard.main(["surgery", str(source), str(out), surgery]) == 0
    inputs, _ = LocalBatch(num_mtp_layers=DEPTH).training_inputs(tokens())
    with torch.no_grad():
        before, after = (load_ours(each)(inputs, depth=DEPTH) for each in (source, out))
    assert (before.logits - after.logits).abs().max() < 1e-4
    for one, other in zip(before.mtp_logits, after.mtp_logits, strict=True):
        assert (one - other).abs().max() < 1e-4


def test_an_export_is_what_was_imported(folder: Path, tmp_path: Path):
    assert load_spec(folder / "ours/spec.toml").model.num_mtp_layers == DEPTH
    assert run("export", folder / "ours/checkpoints", tmp_path / "out") == 0
    before, after = (
        load_file(path / "model.safetensors") for path in (folder / "hf", tmp_path / "out")
    )
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["model_type"], config["num_nextn_predict_layers"]) == (CASE, DEPTH)
    assert run("import", tmp_path / "out", tmp_path / "again") == 0
    assert weights_of(tmp_path / "again/checkpoints") == weights_of(folder / "ours/checkpoints")


def test_copies_may_be_missing_and_must_be_copies(folder: Path, tmp_path: Path, capsys):
    source, name = tmp_path / "hf", f"model.layers.{LAYERS}.shared_head.head.weight"
    shutil.copytree(folder / "hf", source)
    change_tensors(source, {name: None})
    assert run("import", source, tmp_path / "ours") == 0
    assert weights_of(tmp_path / "ours/checkpoints") == weights_of(folder / "ours/checkpoints")
    capsys.readouterr()
    change_tensors(source, {name: torch.zeros(300, 32)})
    assert run("import", source, tmp_path / "other") == 2
    assert f"{name} must be lm_head.weight" in one_error_line(capsys.readouterr().err)
    change_tensors(source, {name: None, f"model.layers.{LAYERS}.hnorm.weight": None})
    assert run("import", source, tmp_path / "other") == 2
    assert "hnorm.weight is missing" in one_error_line(capsys.readouterr().err)


def test_a_config_may_speak_of_modules_that_the_files_lack(folder: Path, tmp_path: Path):
    """transformers leaves the modules out, and keeps the number in config.json."""
    source = shutil.copytree(folder / "hf", tmp_path / "hf")
    gone = dict.fromkeys(module_tensors(DEPTH))
    change_tensors(source, gone)
    assert run("import", source, tmp_path / "ours") == 0
    assert load_spec(tmp_path / "ours/spec.toml").model.num_mtp_layers == 0


@pytest.mark.parametrize("family", ["deepseek_v2", "dots1"])
def test_other_families_have_no_multi_token_prediction(folder, tmp_path, capsys, family):
    source = folder / "ours/checkpoints"
    assert run("export", source, tmp_path / "out", "--family", family) == 2
    assert "model.num_mtp_layers (2) must be 0" in one_error_line(capsys.readouterr().err)


@pytest.mark.parametrize("case", ["glm4_moe", "glm4_moe_lite"])
def test_glm_has_the_same_modules_under_the_same_names(case, tmp_path):
    """As its released files have them; transformers leaves them out."""
    folder, generator = tmp_path / "hf", torch.Generator().manual_seed(3)
    make_model(case).save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    last, module = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    more = {
        name.replace(last, module): value + 0.1 * torch.randn(value.shape, generator=generator)
        for name, value in stored.items()
        if name.startswith(last)
    }
    for name in ("enorm", "hnorm", "shared_head.norm"):
        more[f"{module}{name}.weight"] = 1 + 0.5 * torch.randn(32, generator=generator)
    more[f"{module}eh_proj.weight"] = torch.randn(32, 64, generator=generator) / 8
    more[f"{module}embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
    more[f"{module}shared_head.head.weight"] = stored["lm_head.weight"].clone()
    change_tensors(folder, dict(more))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    assert run("import", folder, tmp_path / "ours") == 0
    assert load_spec(tmp_path / "ours/spec.toml").model.num_mtp_layers == 1
    assert run("export", tmp_path / "ours/checkpoints", tmp_path / "out") == 0
    again = load_file(tmp_path / "out/model.safetensors")
    assert again.keys() == stored.keys() | more.keys()
    for name, value in {**stored, **more}.items():
        assert torch.equal(again[name], value), name
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert (written["model_type"], written["num_nextn_predict_layers"]) == (case, 1)
