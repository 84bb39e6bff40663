"""Tiny random models of transformers, with values that a swapped or forgotten one would show in."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import ckpt
from convoy.commands.command_line import main
from convoy.convert.hf.families import FAMILIES
from moe import MoEConfig
from parallel import Topology
from pretrain.model.config import ModelConfig
from pretrain.model.decoder import Decoder, meta_decoder
from pretrain.parallelize.layouts import parameter_layouts
from pretrain.spec import moe_fields
from pretrain.state.arrays import model_arrays

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

SIZES = {
    "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-3, "max_position_embeddings": 128,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}
YARN = {
    "rope_type": "yarn", "rope_theta": 700.0, "factor": 4.0, "beta_fast": 8.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True}
DEEPSEEK = {
    **SIZES, "num_key_value_heads": 4, "intermediate_size": 40, "moe_intermediate_size": 12,
    "n_routed_experts": 12, "num_experts_per_tok": 4, "n_shared_experts": 2, "kv_lora_rank": 16,
    "q_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 6, "v_head_dim": 10,
    "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "first_k_dense_replace": 1,
}  # fmt: skip
GLM = {
    "intermediate_size": 40, "moe_intermediate_size": 12, "n_routed_experts": 12,
    "num_experts_per_tok": 4, "n_shared_experts": 2, "n_group": 3, "topk_group": 2,
    "routed_scaling_factor": 1.7,
}  # fmt: skip
GRANITE = {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.7,
    "logits_scaling": 1.5,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {
        **SIZES, **ROPE, "head_dim": 10, "intermediate_size": 24, "num_local_experts": 6,
        "num_experts_per_tok": 2,
    }),
    "olmoe": ("Olmoe", {**SIZES, **ROPE, **MOE, "intermediate_size": 20, "norm_topk_prob": False}),
    "olmoe-normed": ("Olmoe", {**SIZES, **ROPE, **MOE, "intermediate_size": 20}),
    "qwen3_moe": ("Qwen3Moe", {
        **SIZES, **MOE, "head_dim": 12, "moe_intermediate_size": 20, "intermediate_size": 36,
        "mlp_only_layers": [0], "rope_parameters": YARN, "tie_word_embeddings": True,
    }),
    "qwen3_moe-unnormed": ("Qwen3Moe", {
        **SIZES, **ROPE, **MOE, "head_dim": 12, "moe_intermediate_size": 20,
        "norm_topk_prob": False,
    }),
    "deepseek_v3": ("DeepseekV3", {
        **DEEPSEEK, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.6},
    }),
    "deepseek_v3-plain": ("DeepseekV3", {
        **DEEPSEEK, **ROPE, "q_lora_rank": None, "rope_interleave": False, "n_group": 1,
        "topk_group": 1, "norm_topk_prob": False, "first_k_dense_replace": 0,
    }),
    "mixtral-one": ("Mixtral", {
        **SIZES, **ROPE, "intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 1,
        "router_jitter_noise": 0.125,
    }),
    "qwen3_moe-one": ("Qwen3Moe", {
        **SIZES, **ROPE, **MOE, "head_dim": 12, "moe_intermediate_size": 20,
        "num_experts_per_tok": 1,
    }),
    "deepseek_v2": ("DeepseekV2", {
        **DEEPSEEK, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        "topk_method": "group_limited_greedy",
    }),
    "deepseek_v2-lite": ("DeepseekV2", {
        **DEEPSEEK, **ROPE, "q_lora_rank": None, "n_group": None, "topk_group": None,
        "routed_scaling_factor": 1.0, "first_k_dense_replace": 0,
    }),
    "dots1": ("Dots1", {
        **SIZES, **ROPE, "head_dim": 12, "intermediate_size": 40, "moe_intermediate_size": 12,
        "n_routed_experts": 12, "num_experts_per_tok": 4, "n_shared_experts": 2,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
        "n_group": 3, "topk_group": 2,
    }),
    "qwen2_moe": ("Qwen2Moe", {
        **SIZES, **ROPE, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12,
        "intermediate_size": 36, "shared_expert_intermediate_size": 24, "mlp_only_layers": [0],
    }),
    "glm4_moe": ("Glm4Moe", {
        **SIZES, **GLM, "head_dim": 12, "attention_bias": True, "use_qk_norm": True,
        "rope_parameters": {**YARN, "partial_rotary_factor": 0.5},
    }),
    "glm4_moe-whole": ("Glm4Moe", {
        **SIZES, **GLM, "head_dim": 12, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
        "rope_parameters": {**ROPE["rope_parameters"], "partial_rotary_factor": 1.0},
    }),
    "glm4_moe_lite": ("Glm4MoeLite", {
        **DEEPSEEK, **ROPE, "mlp_layer_types": ["dense", "dense", "sparse"],
    }),
    "solar_open": ("SolarOpen", {
        **SIZES, **ROPE, **GLM, "head_dim": 10, "attention_bias": True,
    }),
    "minimax_m2": ("MiniMaxM2", {
        **SIZES, "head_dim": 12, "intermediate_size": 16, "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "rope_parameters": {**ROPE["rope_parameters"], "partial_rotary_factor": 2 / 3},
    }),
    "hy_v3": ("HYV3", {
        **SIZES, **ROPE, "head_dim": 12, "num_experts": 8, "num_experts_per_tok": 3,
        "intermediate_size": 40, "moe_intermediate_size": 12, "num_shared_experts": 2,
        "router_scaling_factor": 1.7, "attention_bias": True,
    }),
    "ernie4_5_moe": ("Ernie4_5_Moe", {
        **SIZES, **ROPE, "moe_num_experts": 8, "moe_k": 3, "moe_num_shared_experts": 2,
        "moe_intermediate_size": 12, "intermediate_size": 36, "moe_layer_start_index": 1,
    }),
    "ernie4_5_moe-plain": ("Ernie4_5_Moe", {
        **SIZES, **ROPE, "moe_num_experts": 8, "moe_k": 3, "moe_num_shared_experts": 0,
        "moe_intermediate_size": 12, "moe_layer_start_index": 0, "tie_word_embeddings": False,
    }),
    "flex_olmo": ("FlexOlmo", {
        **SIZES, **ROPE, **MOE, "intermediate_size": 20, "attention_bias": True,
    }),
    "granitemoe": ("GraniteMoe", {
        **SIZES, **ROPE, **GRANITE, "num_local_experts": 6, "num_experts_per_tok": 2,
        "intermediate_size": 12,
    }),
    "granitemoeshared": ("GraniteMoeShared", {
        **SIZES, **ROPE, **GRANITE, "num_local_experts": 6, "num_experts_per_tok": 2,
        "intermediate_size": 12, "shared_intermediate_size": 24, "tie_word_embeddings": True,
        "attention_bias": True,
    }),
    "mellum": ("Mellum", {
        **SIZES, **MOE, "head_dim": 12, "moe_intermediate_size": 20, "intermediate_size": 36,
        "mlp_layer_types": ["dense", "sparse", "sparse"], "rope_parameters": {
            "full_attention": YARN, "sliding_attention": ROPE["rope_parameters"],
        },
    }),
    "llama": ("Llama", {**SIZES, **ROPE, "intermediate_size": 36, "head_dim": 10}),
    "mistral": ("Mistral", {**SIZES, **ROPE, "intermediate_size": 36, "sliding_window": None}),
    "llama-biased": ("Llama", {
        **SIZES, **ROPE, "intermediate_size": 36, "attention_bias": True,
    }),
    "qwen3": ("Qwen3", {**SIZES, **ROPE, "intermediate_size": 36, "head_dim": 12}),
    "qwen2": ("Qwen2", {**SIZES, **ROPE, "intermediate_size": 36}),
    "ernie4_5": ("Ernie4_5", {**SIZES, **ROPE, "intermediate_size": 36, "head_dim": 12}),
    "olmo2": ("Olmo2", {**SIZES, **ROPE, "intermediate_size": 36}),
    "granite": ("Granite", {**SIZES, **ROPE, **GRANITE, "intermediate_size": 36}),
}  # fmt: skip
MOE_CASES = [name for name in CASES if FAMILIES[name.partition("-")[0]].sparse]
SHORT = (
    "olmoe",
    "qwen3_moe",
    "deepseek_v3",
    "deepseek_v2",
    "glm4_moe",
    "ernie4_5_moe",
    "flex_olmo",
    "granitemoeshared",
    "qwen3",
)
"""Of every kind of attention, router and file, for the default suite."""


def make_model(case: str, **changes: Any) -> PreTrainedModel:
    """Random everywhere, in norms and biases too, and large enough to make a difference."""
    prefix, values = CASES[case]
    config = getattr(transformers, f"{prefix}Config")(**{**values, **changes})
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(sum(map(ord, case)))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.ndim == 1:
                tensor.copy_(0.5 * noise + (not name.endswith("bias")))
            else:
                scale = 1.0 if "embed" in name else tensor.shape[-1] ** -0.5
                tensor.copy_(scale * noise)
    return model


def tokens(vocab_size: int = 300) -> torch.Tensor:
    return torch.randint(0, vocab_size, (3, 50), generator=torch.Generator().manual_seed(1))


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens(), use_cache=False).logits.float()


def load_theirs(folder: Path) -> PreTrainedModel:
    """Strictly: nothing missing, nothing left over."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, local_files_only=True
    )
    assert not report["missing_keys"], report
    assert not report["unexpected_keys"], report
    assert not report["mismatched_keys"], report
    return model.eval()


def load_ours(root: Path) -> Decoder:
    manifest = ckpt.read_manifest(root)
    moe = moe_fields(manifest.spec)
    model = meta_decoder(
        ModelConfig.model_validate(manifest.spec["model"]),
        None if moe is None else MoEConfig.model_validate(moe),
    ).to_empty(device="cpu")
    arrays = model_arrays(model, model, parameter_layouts(model, Topology()), 0)
    ckpt.load(root, manifest, arrays, extra="ignore")  # of a run without its moments
    return model.eval()


def our_logits(root: Path) -> torch.Tensor:
    with torch.no_grad():
        return load_ours(root)(tokens()).logits


def weights_of(root: Path) -> dict[str, tuple[int, int]]:
    """A checksum of every object of the weights."""
    manifest = ckpt.read_manifest(root)
    ckpt.verify(root, manifest)
    return {k: (r.bytes, r.checksum) for k, r in manifest.objects.items() if "/c." in k}


def run(*arguments: object) -> int:
    """The command."""
    return main("convert", [str(argument) for argument in arguments])


def make_folders(root: Path, cases: Iterable[str] = CASES) -> Path:
    """Each case, saved as CASE and imported as CASE-ours."""
    for case in cases:
        make_model(case).save_pretrained(root / case)
        assert run("import", root / case, root / f"{case}-ours") == 0
    return root


def change_tensors(folder: Path, values: dict[str, torch.Tensor | None]) -> None:
    """Replace, add or, with None, remove tensors."""
    path = folder / "model.safetensors"
    held = {**load_file(path), **values}
    save_file({k: v.contiguous() for k, v in held.items() if v is not None}, path)
