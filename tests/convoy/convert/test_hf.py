"""Hugging Face folders and checkpoints that are refused, and what a failure leaves: nothing."""

from __future__ import annotations

import errno
import json
import shutil
import sys

import numpy as np
import pytest
import torch

import ckpt
from ckpt.format.dtypes import convert
from ckpt.rewrite import LEAST_MEMORY, CheckpointTarget, rewrite
from ckpt.rewrite.edits import Converted
from ckpt.rewrite.folder_target import Checked
from ckpt.rewrite.source import CheckpointSource, SourceArray
from ckpt.store.posix import Files
from convoy.convert.hf.files import from_hf
from convoy.convert.hf.tensors import HFTensor
from parallel.layout import Topology
from tests.convoy.commands.test_tools import one_error_line
from tests.support.checkpoints import objects_folder
from tests.support.hf import change_tensors, make_folders, run
from tests.support.sources import MemorySource


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    cases = (
        "mixtral", "olmoe", "deepseek_v3", "qwen3", "qwen3_moe", *(case for case, *_ in BAD_CONFIGS)
    )  # fmt: skip
    return make_folders(tmp_path_factory.mktemp("hf"), dict.fromkeys(cases))


BAD_CONFIGS = [
    ("mixtral", {"model_type": "gpt2"}, 'model_type ("gpt2") must be one of qwen3_moe, olmoe,'),
    ("mixtral", {"hidden_size": None}, "config.json: hidden_size is missing"),
    ("mixtral", {"hidden_size": "x"}, 'hidden_size ("x") must be a whole number'),
    ("mixtral", {"hidden_act": "gelu"}, 'hidden_act ("gelu") must be "silu" or "swish"'),
    ("mixtral", {"sliding_window": 64}, "sliding_window (64) must be null or at least max"),
    ("mixtral", {"num_experts_per_tok": 9},
     "config.json: num_experts_per_tok (9) must be at most num_local_experts (6)"),
    ("mixtral", {"router_jitter_noise": 1.5}, "config.json: router_jitter_noise (1.5): Input"),
    ("olmoe", {"router_jitter_noise": 0.1}, "router_jitter_noise (0.1) must be 0"),
    ("mixtral", {"vocab_size": 200}, "config.json: vocab_size (200): Input should be greater than"),
    ("deepseek_v3", {"num_experts_per_tok": 1}, "num_experts_per_tok (1) must be at least 2 with"),
    ("deepseek_v3", {"n_group": 5}, "n_routed_experts (12) must be a multiple of n_group (5)"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob (true) must be false"),
    ("deepseek_v2", {"topk_method": "noaux_tc"},
     'topk_method ("noaux_tc") must be "greedy" or "group_limited_greedy"'),
    ("dots1", {"sliding_window": 64, "max_window_layers": 2}, "sliding_window (64) must be null"),
    ("mixtral", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}},
     'rope_parameters: rope_type ("llama3") must be "default" or "yarn"'),
    ("qwen3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 9.0, "factor": 2.0,
                                   "attention_factor": 1.5}},
     "attention_factor (1.5) must be left out"),
    ("mistral", {"rope_parameters": {"rope_theta": 9.0, "mrope_section": [1]}},
     "rope_parameters: mrope_section ([1]) must be left out: it is not known"),
    ("mistral", {"tie_word_embeddings": True}, "lm_head.weight must be model.embed_tokens.weight"),
    ("llama", {"mlp_bias": True}, "mlp_bias (true) must be false"),
    ("llama", {"attention_bias": True}, "tensor model.layers.0.self_attn.q_proj.bias is missing"),
    ("deepseek_v3", {"attention_bias": True}, "attention_bias (true) must be false"),
    ("mixtral", {"model_type": "gpt_oss"},
     "config.json: model_type (gpt_oss) is not converted: its attention has sinks and sliding"),
    ("mixtral", {"model_type": "inkling_mm_model"}, "model_type (inkling_mm_model) is not convert"),
    ("mixtral", {"model_type": "llama4_text"}, "model_type (llama4_text) is not converted: its at"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 30},
     "shared_expert_intermediate_size (30) must be a multiple of moe_intermediate_size (12)"),
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]},
     'mlp_layer_types (["sparse", "dense", "sparse"]) must be dense for first layers, then sparse'),
    ("mellum", {"layer_types": ["full_attention", "full_attention", "sliding_attention"]},
     "must be full_attention alone"),
    ("ernie4_5_moe", {"moe_layer_end_index": 1}, "moe_layer_end_index (1) must be -1 or 2"),
    ("glm4_moe", {"rope_parameters": {"rope_theta": 9.0, "partial_rotary_factor": 0.75}},
     "model.qk_rope_head_dim (9) must be even and at most the size of a head (12)"),
    ("hy_v3", {"num_experts_per_tok": 1}, "num_experts_per_tok (1) must be at least 2 with"),
    ("granitemoe", {"intermediate_size": 11},
     "input_linear.weight has shape [6, 24, 32], config.json needs [6, 22, 32]"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv (8.0) must be null"),
    ("olmoe", {"intermediate_size": 21}, "has shape [20, 32], config.json needs [21, 32]"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step (2) must be 1"),
    ("qwen3_moe", {"mlp_only_layers": [2]}, "mlp_only_layers ([2]) must be the first layers"),
    ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window (true) must be false"),
    ("qwen3_moe", {"tie_word_embeddings": False}, "tensor lm_head.weight is missing; config.json"),
    ("deepseek_v3", {"topk_method": "greedy"}, 'topk_method ("greedy") must be "noaux_tc"'),
    ("deepseek_v3", {"num_hidden_layers": 4}, "tensor model.layers.3.input_layernorm.weight is mi"),
    ("deepseek_v3", {"num_hidden_layers": 2, "num_nextn_predict_layers": 0},
     "tensor model.layers.2.input_layernorm.weight is unexpected"),
    ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "convert the weights to"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "changes", "message"), BAD_CONFIGS)
def test_configs_that_are_not_convoys_are_refused(
    folders, tmp_path, capsys, case, changes, message
):
    source = shutil.copytree(folders / case, tmp_path / "hf")
    config = json.loads((source / "config.json").read_text()) | changes
    (source / "config.json").write_text(json.dumps(config))
    assert run("import", source, tmp_path / "out") == 2
    assert message in one_error_line(capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


NAME = "model.layers.1.block_sparse_moe.experts.3.w2.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({NAME: None}, f"tensor {NAME} is missing"),
        ({"model.extra.weight": torch.zeros(2)}, "model.safetensors: tensor model.extra.weight is"),
        ({NAME: torch.zeros(24, 32)}, f"{NAME} has shape [24, 32], config.json needs [32, 24]"),
        ({NAME: torch.zeros(32, 24).double()}, f"{NAME} has dtype F64, one of F32, BF16, F16"),
        ({f"{NAME}_scale_inv": torch.zeros(1)}, f"{NAME}_scale_inv: the weights are fp8; convert"),
    ],
)
def test_tensors_that_are_not_the_configs_are_refused(folders, tmp_path, capsys, changes, message):
    source = shutil.copytree(folders / "mixtral", tmp_path / "hf")
    change_tensors(source, changes)
    assert run("import", source, tmp_path / "out") == 2
    assert message in one_error_line(capsys.readouterr().err)


def test_files_that_are_not_whole_are_refused(folders, tmp_path, capsys):
    source = shutil.copytree(folders / "mixtral", tmp_path / "hf")
    path = source / "model.safetensors"
    whole = path.read_bytes()

    def refused(target: str = "out") -> str:
        assert run("import", source, tmp_path / target) == 2
        return one_error_line(capsys.readouterr().err)

    path.write_bytes(whole[:-10])
    assert "model.safetensors is no whole safetensors file" in refused()
    path.rename(source / "pytorch_model.bin")
    assert "pytorch_model.bin is pickle, which can run code and is never read" in refused()
    (source / "pytorch_model.bin").unlink()
    assert "has no model.safetensors" in refused()
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "one.safetensors"}}))
    assert "one.safetensors cannot be read" in refused()
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../one.safetensors"}}))
    assert "file (../one.safetensors) must be in the same folder" in refused()
    index.write_text("{")
    assert "must be JSON with a weight_map" in refused()
    (source / "config.json").write_text("{")
    assert "config.json is not valid JSON" in refused()
    (source / "config.json").unlink()
    assert "config.json cannot be read: No such file" in refused()
    assert "mixtral-ours must not exist" in refused(str(folders / "mixtral-ours"))


@pytest.mark.parametrize(
    ("case", "family", "message"),
    [
        ("mixtral", "olmoe", "model.qk_norm (none) must be all_heads to be a olmoe model"),
        ("olmoe", "mixtral", "model.qk_norm (all_heads) must be none to be a mixtral model"),
        ("deepseek_v3", "qwen3_moe", "model.latent (true) must be false to be a qwen3_moe model"),
        ("qwen3", "qwen3_moe", "moe (false) must be true to be a qwen3_moe model"),
        ("qwen3_moe", "llama", "moe (true) must be false to be a llama model"),
        ("qwen3_moe", "deepseek_v3", "model.latent (false) must be true"),
    ],
)
def test_what_a_family_cannot_express_is_refused(folders, tmp_path, capsys, case, family, message):
    source = folders / f"{case}-ours/checkpoints"
    assert run("export", source, tmp_path / "out", "--family", family) == 2
    told = one_error_line(capsys.readouterr().err)
    assert message in told
    assert told.rstrip().endswith("can express this model")
    assert case in told.rpartition("; ")[2]
    assert not list(tmp_path.iterdir())


def test_an_export_that_fails_leaves_nothing(folders, tmp_path, capsys):
    source = shutil.copytree(folders / "qwen3-ours/checkpoints", tmp_path / "source")
    manifest = ckpt.read_manifest(source)
    victim = objects_folder(source, manifest.save_id) / "model/norm/weight/c.0"
    data = victim.read_bytes()
    victim.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    # The last norm and the head come after all the layers: most files are written by then.
    assert run("export", source, tmp_path / "out", "--max-file-bytes", 10_000) == 2
    assert "model/norm/weight/c.0 is damaged" in one_error_line(capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    victim.write_bytes(data)
    (tmp_path / "out").mkdir()
    assert run("export", source, tmp_path / "out") == 2
    assert "out must not exist" in one_error_line(capsys.readouterr().err)


def test_an_import_that_runs_out_of_disk_leaves_nothing(folders, tmp_path, capsys, monkeypatch):
    append, count = Files.append, iter(range(100))

    def full(self, handle, data):
        if next(count) == 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        return append(self, handle, data)

    monkeypatch.setattr(Files, "append", full)
    assert run("import", folders / "mixtral", tmp_path / "out") == 2
    assert "No space left on device" in one_error_line(capsys.readouterr().err)
    assert next(count) > 12
    assert not list(tmp_path.iterdir())


def test_an_interrupted_export_leaves_no_folder_and_goes_on_when_it_is_called_again(
    folders, tmp_path, capsys, monkeypatch
):
    source = folders / "mixtral-ours/checkpoints"
    flags = ["--max-file-bytes", 30_000]
    assert run("export", source, tmp_path / "whole", *flags) == 0
    write, count = Checked.write, iter(range(10_000))

    def full(self, data):
        if next(count) == 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(Checked, "write", full)
        assert run("export", source, tmp_path / "out", *flags) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (beside,) = tmp_path.glob(".out.*")
    assert 1 < len(list(beside.glob("*.safetensors"))) < 9
    assert not (beside / "config.json").exists()
    assert run("export", source, tmp_path / "out", *flags) == 0
    made, whole = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("out", "whole")
    )
    assert made == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_an_import_never_reads_a_large_tensor_whole(tmp_path):
    files = MemorySource({
        **{f"e.{i}": SourceArray((512, 8192), "bfloat16") for i in range(3)},  # 8 MiB each
        "embed": SourceArray((4096, 2048), "bfloat16"),  # 16 MiB
    })  # fmt: skip
    experts = SourceArray((1, 3, 8192, 512), "float32", (), {"layers": [0]})
    arrays = {"model/e": experts, "model/embed": SourceArray((4096, 2048), "float32")}
    tensors = [HFTensor(f"e.{i}", "model/e", (0, i), (512, 8192), True) for i in range(3)]
    tensors.append(HFTensor("embed", "model/embed", (), (4096, 2048), False))
    source = Converted(from_hf(files, tensors, arrays), arrays, "float32")
    rewrite(CheckpointTarget(source, tmp_path, Topology()), LEAST_MEMORY)
    assert max(files.read_bytes) <= LEAST_MEMORY // 4
    assert sum(files.read_bytes) == 40 << 20, "each number once"
    whole = tuple((0, size) for size in experts.shape)
    manifest = ckpt.read_manifest(tmp_path)
    found = CheckpointSource(tmp_path, manifest).read_box("model/e", whole)
    for i in range(3):
        expected = convert(files.values[f"e.{i}"], "bfloat16", "float32").T
        assert np.array_equal(found[0, i].view(np.uint32), expected.view(np.uint32))


def test_the_safetensors_library_is_not_needed(folders, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert run("import", folders / "mixtral", tmp_path / "ours") == 0
    assert run("export", tmp_path / "ours/checkpoints", tmp_path / "out") == 0
