"""Hugging Face checkpoints: in, out and grown, held to transformers' own numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer

import ckpt
from convoy.commands.inspect import main as inspect
from convoy.convert.commands import new_spec
from convoy.convert.hf.families import family_of
from convoy.convert.hf.model_config import HFConfig
from corpus.manifest import open_corpus
from corpus.prepare.prepare import prepare_corpus
from corpus.tokenizer import bytes_per_token, read_tokenizer
from parallel import Topology
from pretrain.errors import InputError
from pretrain.model.decoder import meta_decoder
from pretrain.spec.read import load_spec
from tests.convoy.commands.test_tools import one_error_line
from tests.runs.test_runs import launch
from tests.support.hf import (
    change_tensors,
    load_ours,
    load_theirs,
    logits_of,
    make_folders,
    make_model,
    our_logits,
    run,
    tokens,
    weights_of,
)
from tests.support.jobs import make_spec, write_corpus


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Each case saved and imported once."""
    cases = ("mixtral", "deepseek_v3", "qwen3_moe-unnormed", "qwen3", "olmoe", "llama")
    return make_folders(tmp_path_factory.mktemp("hf"), cases)


def test_the_models_are_awkward():
    """Experts are chosen unevenly by groups and biases that matter, or the rest proves little."""
    model = make_model("deepseek_v3")
    theirs = logits_of(model)
    assert 0.3 < theirs.std() < 30
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias.zero_()
    assert (logits_of(model) - theirs).abs().max() > 0.1


def test_many_files_and_bfloat16(folders, tmp_path):
    source, out = folders / "deepseek_v3-ours/checkpoints", tmp_path / "out"
    arguments = ["--max-file-bytes", 60_000, "--dtype", "bfloat16"]
    assert run("export", source, out, *arguments) == 0
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(3)]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    held = {name: file for file in files for name in load_file(out / file)}
    assert index["weight_map"] == held
    stored = {name: t for file in files for name, t in load_file(out / file).items()}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored.values())
    for name, tensor in load_file(folders / "deepseek_v3/model.safetensors").items():
        kept = tensor if name.endswith("bias") else tensor.bfloat16()
        assert torch.equal(stored[name], kept), name
    assert load_theirs(out).dtype == torch.bfloat16
    assert run("import", out, tmp_path / "again") == 0
    again = load_ours(tmp_path / "again/checkpoints")
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    assert torch.equal(again.embed.weight, stored["model.embed_tokens.weight"].float())


def test_what_an_older_transformers_saved_is_read(folders, tmp_path):
    """rope_scaling beside rope_theta, a part of a spare layer that is no multi-token prediction,
    stray buffers."""
    old = shutil.copytree(folders / "deepseek_v3", tmp_path / "old")
    config = json.loads((old / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "num_nextn_predict_layers": 1}
    config["rope_scaling"] = {**rope, "type": rope.pop("rope_type")}
    config["rope_scaling"].pop("rope_type")
    (old / "config.json").write_text(json.dumps(config))
    change_tensors(old, {
        "model.layers.3.input_layernorm.weight": torch.zeros(2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
    })  # fmt: skip
    assert run("import", old, tmp_path / "ours") == 0
    same = weights_of(folders / "deepseek_v3-ours/checkpoints")
    assert weights_of(tmp_path / "ours/checkpoints") == same
    assert (
        load_spec(tmp_path / "ours/spec.toml").model
        == load_spec(folders / "deepseek_v3-ours/spec.toml").model
    )


def test_the_imported_checkpoint_is_one_and_says_so(folders, capsys):
    root = folders / "mixtral-ours"
    assert inspect(["verify", str(root / "checkpoints")]) == 0
    out = capsys.readouterr().out
    assert "imported_from mixtral" in out
    assert "optimizer/" not in out
    spec = load_spec(root / "spec.toml")
    manifest = ckpt.read_manifest(root / "checkpoints")
    assert manifest.spec_hash == spec.hash
    assert spec.init.checkpoint == str(root / "checkpoints")
    assert not [p for p in root.parent.iterdir() if p.name.startswith(".")]


PUBLISHED = {
    "mixtral": (46_702_792_704, {
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "num_local_experts": 8, "rms_norm_eps": 1e-5,
        "rope_theta": 1e6, "sliding_window": None, "vocab_size": 32000,
    }),
    "olmoe": (6_919_161_856, {
        "attention_bias": False, "clip_qkv": None, "hidden_size": 2048, "intermediate_size": 1024,
        "max_position_embeddings": 4096, "norm_topk_prob": False, "num_attention_heads": 16,
        "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
        "num_key_value_heads": 16, "rope_scaling": None, "rope_theta": 10000.0,
        "vocab_size": 50304,
    }),
    "qwen3_moe": (30_532_122_624, {
        "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144,
        "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "rope_scaling": None, "rope_theta": 1000000.0,
        "sliding_window": None, "use_sliding_window": False, "vocab_size": 151936,
    }),
    "deepseek_v3": (671_026_419_200, {
        "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
        "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "routed_scaling_factor": 2.5, "rope_theta": 10000,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
                         "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
                         "type": "yarn"},
        "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc",
        "v_head_dim": 128, "vocab_size": 129280,
    }),
    "deepseek_v2": (15_706_484_224, {  # DeepSeek-V2-Lite
        "aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "hidden_size": 2048,
        "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64,
        "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
        "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "routed_scaling_factor": 1.0, "rope_theta": 10000,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
                         "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
                         "type": "yarn"},
        "scoring_func": "softmax", "seq_aux": True, "topk_group": 1, "topk_method": "greedy",
        "v_head_dim": 128, "vocab_size": 102400,
    }),
}  # fmt: skip


@pytest.mark.parametrize("kind", PUBLISHED)
def test_the_published_models_have_their_sizes(kind):
    parameters, values = PUBLISHED[kind]
    config = HFConfig({"model_type": kind, **values}, "config.json")
    spec = new_spec(family_of(config).sections(config), Path("published"))
    sizes = {n: t.numel() for n, t in meta_decoder(spec.model, spec.moe).state_dict().items()}
    mtp = sum(size for name, size in sizes.items() if name.startswith("mtp."))
    # The routers' biases are among the published ones'.
    assert sum(sizes.values()) - mtp == parameters
    if kind == "deepseek_v3":
        # The hub counts 684,531,386,000 numbers: copies of embedding and head, and a scale
        # for each block of 128 x 128 weights, are among them.
        whole = parameters + mtp + 2 * 129280 * 7168
        assert whole * (1 + 128**-2) == pytest.approx(684_531_386_000, rel=1e-5)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> dict[str, object]:
    """Overrides that make a run small, on a corpus with the models' vocabulary."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder / "text")
    data = {"source": str(folder / "text"), "path": str(folder / "corpus"), "seq_len": 32}
    first = {**data, "path": str(folder / "first")}
    spec = make_spec(folder, data=first, model={"vocab_size": 300})
    prepare_corpus(spec.data, 300)
    # The folders have no tokenizer: a run on their weights must name one.
    data["tokenizer"] = str(folder / "first/tokenizer.json")
    spec = make_spec(folder, data=data, model={"vocab_size": 300})
    prepare_corpus(spec.data, 300)
    return {
        **{f"data.{key}": value for key, value in data.items()},
        "data.shard_tokens": 20_000, "batch.global_batch_size": 4, "batch.micro_batch_size": 2,
        "eval.sequences": 4, "schedule.warmup_steps": 0, "checkpoint.interval_steps": 2,
    }  # fmt: skip


def train(spec: Path, run_dir: Path, world: int, overrides: dict[str, object]) -> str:
    values = [f"{key}={value}" for key, value in {**overrides, "run_dir": run_dir}.items()]
    code, out, err = launch(spec, world, *values)
    assert code == 0, err
    return out


def test_training_begins_with_the_weights_and_what_it_makes_is_exported(
    folders, corpus, tmp_path, capsys
):
    spec, still = folders / "deepseek_v3-ours/spec.toml", tmp_path / "still"
    # With so small a rate a step changes no bit: what comes out is what went in, through ep=2.
    frozen = {**corpus, "train.steps": 1, "optimizer.lr": 1e-30, "moe.bias_update_rate": 0,
              "parallel.ep": 2}  # fmt: skip
    out = train(spec, still, 2, frozen)
    assert "initial weights are those of step 0" in out
    assert run("export", still / "checkpoints", tmp_path / "still-hf") == 0
    for name, tensor in load_file(folders / "deepseek_v3/model.safetensors").items():
        assert torch.equal(load_file(tmp_path / "still-hf/model.safetensors")[name], tensor), name

    moved = {**corpus, "train.steps": 3, "optimizer.lr": 0.01, "parallel.ep": 2}
    train(spec, tmp_path / "moved", 2, moved)
    assert ckpt.read_manifest(tmp_path / "moved/checkpoints").topology["ep"] == 2
    assert run("export", tmp_path / "moved/checkpoints", tmp_path / "hf", "--step", 3) == 0
    theirs = logits_of(load_theirs(tmp_path / "hf"))
    assert (theirs - our_logits(tmp_path / "moved/checkpoints")).abs().max() < 1e-4
    assert (theirs - logits_of(make_model("deepseek_v3"))).abs().max() > 0.1
    # One layout more: the same tensors.
    ckpt.reshard(
        tmp_path / "moved/checkpoints",
        ckpt.read_manifest(tmp_path / "moved/checkpoints"),
        tmp_path / "four",
        Topology(dp_shard=4, ep=4),
    )
    assert run("export", tmp_path / "four", tmp_path / "four-hf") == 0
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("hf", "four-hf")]
    assert files[0] == files[1]


def test_weights_that_do_not_fit_the_spec_are_refused(folders, corpus, tmp_path):
    root = folders / "qwen3_moe-unnormed-ours"
    small = {**corpus, "train.steps": 1, "run_dir": tmp_path / "run"}

    def refused(**more: object) -> str:
        values = [f"{key}={value}" for key, value in {**small, **more}.items()]
        code, _, err = launch(root / "spec.toml", 1, *values)
        assert code == 2
        return one_error_line(err)

    text = refused(**{"moe.d_ff": 22})
    assert f"init.checkpoint ({root}/checkpoints)" in text
    assert "has shape (3, 8, 32, 20) but the model needs (3, 8, 32, 22)" in text
    text = refused(**{"model.qk_norm": "none"})
    assert "array model/layers/attention/k_norm/weight has no place in the model" in text
    assert "no checkpoint in /nowhere" in refused(**{"init.checkpoint": "/nowhere"})
    manifest = root / "checkpoints/manifests/step-00000000.json"
    text = refused(**{"init.checkpoint": manifest, "moe.d_ff": 22})
    assert f"init.checkpoint ({root}/checkpoints): checkpoint array" in text
    text = refused(**{"init.checkpoint": manifest.with_name("step-00000007.json")})
    assert "no checkpoint of step 7 in" in text
    shutil.copytree(root / "checkpoints", tmp_path / "own")
    text = refused(**{"checkpoint.path": tmp_path / "own"})
    assert "holds weights alone; name it in init.checkpoint" in text


@pytest.mark.parametrize("first_k_dense", [0, 1])
def test_an_upcycled_model_begins_as_the_dense_one(folders, tmp_path, first_k_dense):
    sizes = ["--num-experts", 5, "--top-k", 2, "--first-k-dense", first_k_dense]
    for name, source in [
        ("from-hf", folders / "qwen3"), ("from-ckpt", folders / "qwen3-ours/checkpoints"),
    ]:  # fmt: skip
        arguments = ["upcycle", source, tmp_path / name, *sizes, "--set", "moe.route_scale=1.0"]
        assert run(*arguments) == 0
    root = tmp_path / "from-hf/checkpoints"
    assert weights_of(root) == weights_of(tmp_path / "from-ckpt/checkpoints")
    ours, dense = load_ours(root), logits_of(make_model("qwen3"))
    assert len([layer for layer in ours.blocks.values() if layer.moe]) == 3 - first_k_dense
    with torch.no_grad():
        out = ours(tokens())
    assert (out.logits - dense).abs().max() < 1e-4
    assert (out.aux[0].tokens_per_expert_E > 0).all(), "the router is fresh, and not one for all"
    for layer in list(ours.blocks.values())[first_k_dense:]:
        w = layer.moe.experts.w_gate
        assert torch.equal(w, w[:1].expand_as(w))
    routers = [layer.moe.router.weight for layer in list(ours.blocks.values())[first_k_dense:]]
    assert not torch.equal(routers[0], routers[1])
    assert 0.015 < routers[0].std() < 0.025
    assert run("export", root, tmp_path / "hf") == 0
    assert (logits_of(load_theirs(tmp_path / "hf")) - dense).abs().max() < 1e-4
    assert load_spec(tmp_path / "from-ckpt/spec.toml").moe.num_experts == 5


def test_upcycling_refuses_what_is_no_copy(folders, tmp_path, capsys):
    def refused(source: str, *more: str) -> str:
        arguments = [folders / source, tmp_path / "out", "--num-experts", 4, "--top-k", 2, *more]
        assert run("upcycle", *arguments) == 2
        return one_error_line(capsys.readouterr().err)

    assert "olmoe must be a dense model: it has a [moe] section" in refused("olmoe")
    assert "must be a dense model" in refused("olmoe-ours/checkpoints")
    assert "moe.d_ff (8) must be 36: experts are copies" in refused("llama", "--set", "moe.d_ff=8")
    text = refused("llama", "--set", "moe.num_shared_experts=1")
    assert "moe.num_shared_experts (1) must be 0" in text
    assert "moe.top_k (9) must be at most" in refused("llama", "--top-k", "9")
    assert not list(tmp_path.iterdir())


def test_a_spec_of_an_import_works_from_anywhere(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("import", folders / "mixtral", "my model") == 0
    spec_path = tmp_path / "my model" / "spec.toml"
    assert f"convoy pretrain '{spec_path}'" in capsys.readouterr().out
    spec = load_spec(spec_path)
    assert spec.name == "my-model"
    assert spec.init.checkpoint == str(tmp_path / "my model" / "checkpoints")
    assert Path(spec.data.path).is_absolute()
    words = ["my model!", "--num-experts", 4, "--top-k", 2]
    assert run("upcycle", folders / "llama", *words) == 0
    assert f"convoy pretrain '{tmp_path}/my model!/spec.toml'" in capsys.readouterr().out
    grown = load_spec(tmp_path / "my model!" / "spec.toml")
    assert grown.name == "my-model-"
    assert Path(grown.init.checkpoint).is_absolute()


def test_what_convert_cannot_take_is_one_line(folders, tmp_path, capsys):
    ckpt.save_state_dict(tmp_path / "state", {"model": {"w": torch.ones(2)}}, step=1)
    for words in (
        ["export", tmp_path / "state", tmp_path / "out"],
        ["upcycle", tmp_path / "state", tmp_path / "out", "--num-experts", 4, "--top-k", 2],
    ):
        assert run(*words) == 2
        text = one_error_line(capsys.readouterr().err)
        assert "was saved by save_state_dict: it has no model spec" in text
    for number in ("0", "-5", "x"):
        with pytest.raises(SystemExit) as ended:
            run("export", folders / "olmoe-ours/checkpoints", tmp_path / "out",
                f"--max-file-bytes={number}")  # fmt: skip
        assert ended.value.code == 2
        assert "must be a whole number of at least 1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_models_own_tokenizer_is_taken_along(folders, corpus, tmp_path, capsys):
    source = shutil.copytree(folders / "mixtral", tmp_path / "hf")
    made = Tokenizer.from_file(f"{corpus['data.path']}/tokenizer.json")
    renamed = json.loads(made.to_str().replace("<|endoftext|>", "<|end|>"))
    # Settings of a chat, which would cut a document short.
    renamed["truncation"] = {"max_length": 5, "strategy": "LongestFirst", "stride": 0,
                             "direction": "Right"}  # fmt: skip
    path = source / "tokenizer.json"
    path.write_text(json.dumps(renamed))
    config = json.loads((source / "config.json").read_text()) | {"eos_token_id": [0, 7]}
    (source / "config.json").write_text(json.dumps(config))
    assert run("import", source, tmp_path / "ours") == 0
    spec = load_spec(tmp_path / "ours/spec.toml")
    assert spec.data.tokenizer == str(tmp_path / "ours/tokenizer.json")
    assert spec.data.end_token == "<|end|>"
    overrides = {**corpus, "data.path": tmp_path / "corpus", "train.steps": 1}
    other = {**overrides, **corpus, "data.end_token": "<|endoftext|>"}
    with pytest.raises(AssertionError, match="has weights of another tokenizer than that of data"):
        train(tmp_path / "ours/spec.toml", tmp_path / "run", 1, other)
    del overrides["data.tokenizer"]
    train(tmp_path / "ours/spec.toml", tmp_path / "run", 1, overrides)
    taken = Tokenizer.from_file(str(tmp_path / "corpus/tokenizer.json"))
    assert taken.get_vocab() == Tokenizer.from_file(str(path)).get_vocab()
    before = json.loads(Path(f"{corpus['data.path']}/manifest.json").read_text())
    after = json.loads((tmp_path / "corpus/manifest.json").read_text())
    assert after["train"] == before["train"], "the same tokens, under another name of the end"

    with pytest.raises(InputError, match=r"was prepared with end_token <\|end\|>, the spec says"):
        load_spec_and_open(tmp_path / "ours/spec.toml", overrides)
    path.write_text(json.dumps({**renamed, "decoder": {"type": "Fuse"}}))
    assert run("import", source, tmp_path / "not-bytes") == 2
    assert "tokenizer.json) must be byte-level, or SentencePiece" in capsys.readouterr().err
    with pytest.raises(InputError, match="must be byte-level"):
        read_tokenizer(path, 300, "<|end|>")
    path.write_text(json.dumps(renamed))
    with pytest.raises(InputError, match=r"model.vocab_size \(299\) must be above the largest id"):
        read_tokenizer(path, 299, "<|end|>")
    with pytest.raises(InputError, match=r"data.end_token \(x\|y\) must be a token of"):
        read_tokenizer(path, 300, "x|y")


def sentencepiece(folder: Path) -> Path:
    """A tokenizer as transformers converts one of SentencePiece: Llama 2's and Mixtral's form."""
    merges = ["▁ t", "h e", "▁t he", "i n", "▁ s", "e r", "▁▁ ▁▁", "▁ ▁"]
    pieces = [*"▁thealionsrdf", *(merge.replace(" ", "") for merge in merges)]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    special = [
        {"id": i, "content": names[i], "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for i in range(3)
    ]  # fmt: skip
    space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    made = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "pre_tokenizer": None, "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [
            space, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "fuse_unk": True,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "byte_fallback": True, "ignore_merges": False,
                  "vocab": {name: i for i, name in enumerate(names)}, "merges": merges},
    }  # fmt: skip
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(made))
    return path


def test_a_sentencepiece_tokenizer_goes_in_and_out(folders, corpus, tmp_path, capsys):
    source = shutil.copytree(folders / "mixtral", tmp_path / "hf")
    config = json.loads((source / "config.json").read_text()) | {"eos_token_id": 2}
    (source / "config.json").write_text(json.dumps(config))
    (source / "tokenizer.model").write_bytes(b"sentencepiece")
    assert run("import", source, tmp_path / "no") == 2
    assert "tokenizer.model is read only as a tokenizer.json: make one with" in one_error_line(
        capsys.readouterr().err
    )
    theirs = Tokenizer.from_file(str(sentencepiece(source)))
    assert run("import", source, tmp_path / "ours") == 0
    assert "set data.source in" in capsys.readouterr().out
    spec = tmp_path / "ours/spec.toml"
    with pytest.raises(
        AssertionError, match=r"data.source \(name the text to train on here\) must"
    ):
        train(spec, tmp_path / "run", 1, {"data.path": tmp_path / "none"})

    own = {**corpus, "data.path": tmp_path / "corpus", "train.steps": 1, "optimizer.lr": 1e-30}
    del own["data.tokenizer"]
    train(spec, tmp_path / "run", 1, own)
    made = json.loads((tmp_path / "corpus/manifest.json").read_text())
    sizes = bytes_per_token(theirs, 300, "</s>")
    ids = np.fromfile(tmp_path / "corpus" / made["val"][0]["file"], made["dtype"])
    assert sizes[ids].sum() == made["val_bytes"], "every byte of the text is counted once"

    capsys.readouterr()
    assert run("export", tmp_path / "run/checkpoints", tmp_path / "out") == 0
    assert "its tokenizer is that of" in capsys.readouterr().out
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    text = "the sailor is in the inn; déjà vu 漢字"
    plain = {"add_special_tokens": False}
    assert again(text, **plain)["input_ids"] == theirs.encode(text, **plain).ids
    assert again.decode(again(text, **plain)["input_ids"]) == text
    assert (again.eos_token, again.eos_token_id) == ("</s>", 2)
    assert load_theirs(tmp_path / "out").config.eos_token_id == 2

    lossy = json.loads(theirs.to_str())
    lossy["normalizer"]["normalizers"].insert(0, {"type": "Lowercase"})
    lossy["model"]["byte_fallback"] = False
    (source / "tokenizer.json").write_text(json.dumps(lossy))
    assert run("import", source, tmp_path / "lossy") == 2
    assert "must be byte-level, or SentencePiece with byte" in one_error_line(
        capsys.readouterr().err
    )


def test_weights_without_a_tokenizer_are_trained_on_with_a_named_one_only(
    folders, corpus, tmp_path, capsys
):
    root = folders / "mixtral-ours"
    first = str(corpus["data.tokenizer"]).removesuffix("/tokenizer.json")
    values = {**corpus, "data.path": first, "run_dir": tmp_path / "run", "train.steps": 1}
    del values["data.tokenizer"]
    code, _, err = launch(root / "spec.toml", 1, *(f"{k}={v}" for k, v in values.items()))
    assert code == 2
    assert "does not know the tokenizer of its weights: name its" in one_error_line(err)
    assert run("export", root / "checkpoints", tmp_path / "out") == 0
    assert "no tokenizer is in it" in capsys.readouterr().out
    assert not (tmp_path / "out/tokenizer.json").exists()


def load_spec_and_open(path: Path, overrides: dict[str, object]) -> None:
    values = {**overrides, "data.end_token": "a"}
    spec = load_spec(path, [f"{key}={value}" for key, value in values.items()])
    open_corpus(spec.data, spec.model.vocab_size)
