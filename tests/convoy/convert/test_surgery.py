"""Experts dropped, duplicated and made of dense layers: by name, weights and spec together."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt
from ckpt.rewrite.edits import Described, Selected
from ckpt.rewrite.reshard import write_checkpoint
from ckpt.rewrite.source import CheckpointSource, Source
from convoy.commands.command_line import main
from convoy.commands.pretrain import main as pretrain
from convoy.commands.reshard import main as reshard
from convoy.convert.surgery import operate, parse_surgery
from corpus.prepare.prepare import prepare_corpus
from parallel.layout import Topology
from pretrain.model.decoder import Decoder, meta_decoder
from pretrain.parallelize.layouts import parameter_layouts
from pretrain.spec.read import resolve_spec
from pretrain.state.arrays import model_arrays
from tests.convoy.commands.test_tools import one_error_line
from tests.support.hf import logits_of, make_model, our_logits, run, tokens, weights_of
from tests.support.jobs import make_spec, write_corpus
from tests.support.sources import whole

CASES = ["mixtral", "olmoe", "deepseek_v3", "qwen3_moe-unnormed", "qwen3"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("surgery")
    for case in CASES:
        make_model(case).save_pretrained(root / case)
        assert run("import", root / case, root / f"{case}-ours") == 0
    return root


def source_of(folders, case: str) -> Source:
    root = folders / f"{case.removesuffix('-plain')}-ours/checkpoints"
    source = CheckpointSource(root, ckpt.read_manifest(root))
    if not case.endswith("-plain"):
        return source
    # Sigmoid scores that are not renormalized, which no family has.
    spec = json.loads(json.dumps(source.info.spec))
    spec["moe"]["norm_topk_prob"] = False
    return Described(source, replace(source.info, spec=spec))


def load(source: Source) -> Decoder:
    """The model of a source's spec with its weights."""
    spec = resolve_spec(json.loads(json.dumps(source.info.spec)), "the spec")
    model = meta_decoder(spec.model, spec.moe).to_empty(device="cpu")
    for array in model_arrays(model, model, parameter_layouts(model, Topology()), 0):
        box = tuple((0, size) for size in array.spec.shape)
        array.write(box, source.read_box(array.spec.name, box))
    return model.eval()


def logits(source: Source) -> torch.Tensor:
    with torch.no_grad():
        return load(source)(tokens()).logits


def surgery(*arguments: object) -> int:
    return reshard(["surgery", *map(str, arguments)])


@pytest.mark.parametrize("copies", [2, 3])
@pytest.mark.parametrize("case", [*CASES[:-1], "deepseek_v3-plain"])
def test_duplicated_experts_give_the_same_logits(folders, case, copies):
    source = source_of(folders, case)
    made, spec = operate(source, parse_surgery(f"duplicate={copies}"))
    before = source.info.spec["moe"]
    assert spec.moe.num_experts == copies * before["num_experts"]
    assert spec.moe.top_k == copies * before["top_k"]
    assert made.info.spec == spec.as_dict()
    expected, found = logits(source), logits(made)
    assert (found - expected).abs().max() < 2e-4 * expected.abs().max()


def test_noise_tells_copies_apart_and_leaves_the_first_as_it_was(folders):
    source, name = source_of(folders, "mixtral"), "model/layers/moe/router/weight"
    made, spec = operate(source, parse_surgery("duplicate=2"), ["moe.top_k=2"], 0.1)
    assert spec.moe.top_k == 2
    before = source.read_box(name, whole(source.arrays[name]))
    after = made.read_box(name, whole(made.arrays[name]))
    assert np.array_equal(after[:, ::2], before)
    noise = after[:, 1::2] - before
    scale = noise.std(axis=-1) / np.sqrt(np.square(before).mean(axis=-1))
    assert (scale > 0.05).all()
    assert (scale < 0.15).all()
    part = made.read_box(name, ((1, 2), (3, 6), (4, 9)))
    assert np.array_equal(part, after[1:2, 3:6, 4:9]), "however it is read"


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("case", ["mixtral", "deepseek_v3", "qwen3"])
def test_a_wider_model_gives_the_same_logits(folders, case, noise):
    source = source_of(folders, case)
    made, spec = operate(source, parse_surgery("widen=3"), noise=noise)
    before = source.info.spec
    if spec.moe is None:
        assert spec.model.d_ff == 3 * before["model"]["d_ff"]
    else:
        assert spec.moe.d_ff == 3 * before["moe"]["d_ff"]
        assert spec.model.d_ff == before["model"]["d_ff"], "dense layers of a MoE are left alone"
    expected, found = logits(source), logits(made)
    assert (found - expected).abs().max() < 2e-4 * expected.abs().max()

    room = "moe/experts/{}" if spec.moe else "ffn/{}/weight"
    name = f"model/layers/{room.format('w_down')}"
    after = made.read_box(name, whole(made.arrays[name]))
    hidden = 2  # [L, E, F, D] and [L, D, F]
    first, second = (after.take(range(i, after.shape[hidden], 3), hidden) for i in (0, 1))
    assert np.array_equal(first, second) == (not noise), "with noise gradients differ"
    part = tuple((size // 3, size - size // 5) for size in after.shape)
    cut = after[tuple(slice(*extent) for extent in part)]
    assert np.array_equal(made.read_box(name, part), cut), "however it is read"


def test_dropped_experts_are_gone_and_the_others_are_what_they_were(folders, tmp_path):
    source = folders / "mixtral-ours/checkpoints"
    assert surgery(source, tmp_path / "out", "drop=0,2", "--layout", "ep=2") == 0
    before, after = ckpt.open(source), ckpt.open(tmp_path / "out")
    kept = [e for e in range(before.manifest.spec["moe"]["num_experts"]) if e not in (0, 2)]
    assert after.manifest.spec["moe"]["num_experts"] == len(kept)
    assert after.manifest.spec_hash == resolve_spec(after.manifest.spec, "").hash
    assert after.manifest.topology["ep"] == 2
    assert after.manifest.state == {"surgery": "drop=0,2", "tokenizer": ""}
    assert set(after) == {name for name in before if name.startswith("model/")}
    for name, array in after.items():
        old = before[name][...]
        of_experts = "/moe/" in name
        assert np.array_equal(array[...], old[:, kept] if of_experts else old), name
        assert of_experts == (array.shape != old.shape)
    assert torch.isfinite(our_logits(tmp_path / "out")).all()
    names = {"model/layers/moe/router/weight", "model/layers/moe/experts/w_up"}
    far, _ = operate(source_of(folders, "olmoe"), parse_surgery("drop=1,2,3,4"))
    near = source_of(folders, "olmoe")
    kept = [0, *range(5, near.info.spec["moe"]["num_experts"])]
    for name in names:  # few of a wide range: read one by one
        box = (whole(far.arrays[name])[0], (0, 2), *whole(far.arrays[name])[2:])
        old = near.read_box(name, whole(near.arrays[name]))
        assert np.array_equal(far.read_box(name, box), old[:, kept[:2]])


def test_the_remaining_experts_of_a_token_are_chosen_as_before(folders):
    """A token whose experts all stayed goes on to them; others take their next best."""
    source = source_of(folders, "olmoe")
    before, after = load(source), load(operate(source, parse_surgery("drop=1"))[0])
    with torch.no_grad():
        h = before.embed(tokens())
        first, second = (next(b.moe for b in m.blocks.values() if b.moe) for m in (before, after))
        chosen, now = (layer.router(h.flatten(0, 1)).expert_indices_TK for layer in (first, second))
        logits = h.flatten(0, 1) @ first.router.weight.T
    logits[:, 1] = -torch.inf
    expected = logits.topk(chosen.shape[1]).indices
    renumbered = expected - (expected > 1).to(torch.int64)
    assert torch.equal(now.sort(-1).values, renumbered.sort(-1).values)
    assert (chosen == 1).any(), "the one that was dropped had tokens"


def test_upcycling_is_what_the_other_command_does(folders, tmp_path):
    source = folders / "qwen3-ours/checkpoints"
    flags = ["upcycle=4", "--layout", "ep=1"]
    assert surgery(source, tmp_path / "out", *flags) == 0
    dense = logits_of(make_model("qwen3"))
    assert (our_logits(tmp_path / "out") - dense).abs().max() < 1e-4
    arguments = ["--num-experts", 4, "--top-k", 2]
    assert run("upcycle", source, tmp_path / "other", *arguments) == 0
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "other/checkpoints")


def test_surgery_refuses_what_does_not_fit(folders, tmp_path, capsys):
    def refused(case: str, *flags: str) -> str:
        capsys.readouterr()
        assert surgery(folders / f"{case}-ours/checkpoints", tmp_path / "out", *flags) == 2
        assert not (tmp_path / "out").exists()
        return one_error_line(capsys.readouterr().err)

    assert "must be one of upcycle=NUM_EXPERTS" in refused("mixtral", "grow=3")
    assert "must be one of" in refused("mixtral", "duplicate=2,3")
    assert "at least 2 copies" in refused("mixtral", "duplicate=1")
    assert "drop (99) must be an expert's number, 0 to" in refused("mixtral", "drop=99")
    assert "must be a dense model" in refused("mixtral", "upcycle=4")
    assert "needs a model with experts" in refused("qwen3", "drop=1")
    experts = ckpt.read_manifest(folders / "olmoe-ours/checkpoints").spec["moe"]["num_experts"]
    most = ",".join(map(str, range(1, experts)))
    assert "moe.top_k (" in refused("olmoe", f"drop={most}")
    assert "moe.num_experts (" in refused("deepseek_v3", "drop=1"), "groups are equal"
    text = refused("mixtral", "drop=1", "--set", "moe.d_ff=4")
    assert "w_down has shape" in text
    assert "but the new spec's model needs" in text
    assert "--noise (0.1) must be 0 but with duplicate and widen" in refused(
        "mixtral", "drop=1", "--noise", "0.1"
    )
    assert "layout ep (7) must divide moe.num_experts" in refused(
        "mixtral", "duplicate=2", "--layout", "ep=7"
    )
    assert "layout pp (8) must be at most model.num_layers (" in refused(
        "mixtral", "duplicate=2", "--layout", "pp=8"
    )


PLACES = {
    "0.2": {"attention": "attention", "experts": "moe.experts.{}", "head": "output"},
    "0.3": {"attention": "attention.qkv_linear", "experts": "moe.routed_experts.inner_experts.{}",
            "head": "lm_head"},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("version", PLACES)
def test_torchtitans_weights_are_those_that_an_import_gives(folders, tmp_path, version):
    """The names are torchtitan's, by its own table of what they are in Hugging Face's files."""
    places, theirs = PLACES[version], make_model("qwen3_moe-unnormed").state_dict()
    tensors: dict[str, torch.Tensor] = {}
    plain = {
        "model.embed_tokens.weight": "tok_embeddings.weight", "model.norm.weight": "norm.weight",
        "lm_head.weight": f"{places['head']}.weight",
    }  # fmt: skip
    in_layer = {
        **{f"self_attn.{x}_proj": f"{places['attention']}.w{x}" for x in "qkv"},
        "self_attn.o_proj": "attention.wo", "self_attn.q_norm": "attention.q_norm",
        "self_attn.k_norm": "attention.k_norm", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm", "mlp.gate": "moe.router.gate",
        "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }  # fmt: skip
    ends = {"w1": "_EFD", "w2": "_EDF", "w3": "_EFD"} if version == "0.3" else {}
    for name, tensor in theirs.items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+?)(\.weight)?", name)
        if match is None:
            tensors[plain[name]] = tensor
        elif match[2] == "mlp.experts.gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            for role, part in (("w1", gate), ("w3", up)):
                place = places["experts"].format(role + ends.get(role, ""))
                tensors[f"layers.{match[1]}.{place}"] = part.contiguous()
        elif match[2] == "mlp.experts.down_proj":
            place = places["experts"].format("w2" + ends.get("w2", ""))
            tensors[f"layers.{match[1]}.{place}"] = tensor
        else:
            tensors[f"layers.{match[1]}.{in_layer[match[2]]}.weight"] = tensor
    dcp.save({**tensors, "train_state": {"step": 3}}, checkpoint_id=tmp_path / "theirs")

    def moved(name: str, target: str) -> int:
        places = str(tmp_path / name), str(tmp_path / target)
        return main(arguments=["convert", "move", *places, "--to", "convoy"])

    assert moved("theirs", "out") == 0
    found, imported = (
        ckpt.open(root)
        for root in (tmp_path / "out", folders / "qwen3_moe-unnormed-ours/checkpoints")
    )
    assert set(found) == set(imported)
    for name, array in imported.items():
        assert found[name].attributes == array.attributes, name
        assert np.array_equal(found[name][...], array[...]), name
    tensors["layers.0.odd.weight"] = torch.ones(2)
    dcp.save(tensors, checkpoint_id=tmp_path / "odd")
    assert moved("odd", "other") == 2


def test_a_run_begins_with_renamed_weights_and_fresh_ones_when_told(folders, tmp_path, capsys):
    """Weights alone, of which one has another name and one is not there."""
    write_corpus(tmp_path / "text", 12)
    data = {"source": str(tmp_path / "text"), "path": str(tmp_path / "first"), "seq_len": 32}
    spec = make_spec(tmp_path, data=data, model={"vocab_size": 300})
    prepare_corpus(spec.data, 300)
    data |= {"path": str(tmp_path / "corpus"), "tokenizer": str(tmp_path / "first/tokenizer.json")}
    source = source_of(folders, "mixtral")
    names = {name: name for name in source.arrays if name.startswith("model/")}
    del names["model/norm/weight"]
    names["model/stem/weight"] = names.pop("model/embed/weight")
    write_checkpoint(Selected(source, names), tmp_path / "weights", Topology())
    small = {
        **{f"data.{key}": value for key, value in data.items()},
        "data.shard_tokens": 20_000, "train.steps": 1, "batch.global_batch_size": 4,
        "batch.micro_batch_size": 2, "eval.sequences": 4, "schedule.warmup_steps": 0,
        "optimizer.lr": 1e-30, "moe.bias_update_rate": 0, "run_dir": tmp_path / "run",
        "init.checkpoint": tmp_path / "weights",
    }  # fmt: skip

    def train(*more: str) -> tuple[int, str, str]:
        capsys.readouterr()
        flags = [part for k, v in small.items() for part in ("--set", f"{k}={v}")]
        flags += [part for rule in more for part in ("--set", rule)]
        code = pretrain([str(folders / "mixtral-ours/spec.toml"), *flags])
        return code, *capsys.readouterr()

    rename = 'init.rename={"model/stem/" = "model/embed/"}'
    code, _, err = train(rename)
    assert code == 2
    assert "has no array model/norm/weight" in one_error_line(err)
    code, _, err = train("init.strict=false")
    assert code == 2
    assert "model/stem/weight has no place in the model" in one_error_line(err)
    code, out, err = train(rename, "init.strict=false")
    assert code == 0, err
    assert "model/norm/weight is not in init.checkpoint and is initialized at random" in out
    made = ckpt.open(tmp_path / "run/checkpoints")
    old = source.read_box("model/embed/weight", whole(source.arrays["model/embed/weight"]))
    assert np.array_equal(made["model/embed/weight"][...], old)
    assert (made["model/norm/weight"][...] == 1).all()
