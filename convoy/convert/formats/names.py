"""The rules that several projects share: models with the modules of Hugging Face transformers.

Legend: L layers, E experts, D d_model, F d_ff.
"""

from __future__ import annotations

from convoy.convert.formats.rules import Rule

GATE, UP, DOWN = (f"layers/moe/experts/w_{role}" for role in ("gate", "up", "down"))
"""The matrices of experts, [L, E, D, F] and, down, [L, E, F, D]."""
_L = "model.layers.{layer}."
_IN_LAYER = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention/wq",
    "self_attn.k_proj": "attention/wk",
    "self_attn.v_proj": "attention/wv",
    "self_attn.o_proj": "attention/wo",
    "self_attn.q_norm": "attention/q_norm",
    "self_attn.k_norm": "attention/k_norm",
    "self_attn.q_a_proj": "attention/wq_a",
    "self_attn.q_a_layernorm": "attention/q_a_norm",
    "self_attn.q_b_proj": "attention/wq_b",
    "self_attn.kv_a_proj_with_mqa": "attention/wkv_a",
    "self_attn.kv_a_layernorm": "attention/kv_a_norm",
    "self_attn.kv_b_proj": "attention/wkv_b",
    "mlp.gate_proj": "ffn/w_gate",
    "mlp.up_proj": "ffn/w_up",
    "mlp.down_proj": "ffn/w_down",
    "mlp.shared_experts.gate_proj": "moe/shared_experts/w_gate",
    "mlp.shared_experts.up_proj": "moe/shared_experts/w_up",
    "mlp.shared_experts.down_proj": "moe/shared_experts/w_down",
    "mlp.shared_expert_gate": "moe/shared_gate",
}
ROUTER_BIAS = "layers/moe/router/expert_bias"


def decoder(router: str = "mlp.gate", bias: str = "mlp.gate.e_score_correction_bias"
            ) -> tuple[Rule, ...]:  # fmt: skip
    """All arrays but the experts' own."""
    return (
        Rule("model.embed_tokens.weight", "embed/weight"),
        Rule("model.norm.weight", "norm/weight"),
        Rule("lm_head.weight", "head/weight"),
        *(Rule(f"{_L}{name}.weight", f"layers/{ours}/weight") for name, ours in _IN_LAYER.items()),
        Rule(f"{_L}{router}.weight", "layers/moe/router/weight"),
        Rule(f"{_L}{bias}", ROUTER_BIAS, of="buffer"),
    )


EXPERT_LIST = tuple(
    Rule(f"{_L}mlp.experts.{{expert}}.{role}_proj.weight", ours, turned=True)
    for role, ours in (("gate", GATE), ("up", UP), ("down", DOWN))
)
"""A module for each expert, [F, D]: transformers up to 4, and Hugging Face files."""
FUSED_EXPERTS = (
    Rule(f"{_L}mlp.experts.gate_up_proj", (GATE, UP), turned=True),
    Rule(f"{_L}mlp.experts.down_proj", DOWN, turned=True),
)
"""All experts in one parameter, [E, 2 F, D]: transformers from 5."""
GROUPED_EXPERTS = tuple(
    Rule(f"{_L}mlp.experts.{theirs}", ours, turned=True)
    for theirs, ours in (("w1", GATE), ("w2", DOWN), ("w3", UP))
)
"""All experts in three parameters, [E, F, D]: DeepSpeed's AutoEP."""
AUTOMODEL_EXPERTS = (
    Rule(f"{_L}mlp.experts.gate_and_up_projs", (GATE, UP)),
    Rule(f"{_L}mlp.experts.down_projs", DOWN),
)
"""All experts in one parameter, [E, D, 2 F]: NeMo Automodel."""
