"""The rules that several projects share: models with the modules of Hugging Face transformers.

Legend: L layers, E experts, D d_model, F d_ff.
"""

from __future__ import annotations

from convoy.convert.formats.rules import Rule
from convoy.convert.hf import LAYER_NAMES

GATE, UP, DOWN = (f"layers/moe/experts/w_{role}" for role in ("gate", "up", "down"))
"""The matrices of experts, [L, E, D, F] and, down, [L, E, F, D]."""
_L = "model.layers.{layer}."
_OWN_RULES = ("moe.router.", "moe.experts.")
_IN_LAYER = {
    theirs: ours.replace(".", "/")
    for ours, theirs in LAYER_NAMES.items()
    if not ours.startswith(_OWN_RULES) and not ours.endswith(".bias")
}
"""Of each tensor within a layer, the array. No format takes biases of attention."""
ROUTER_BIAS = "layers/moe/router/expert_bias"


def decoder(router: str = "mlp.gate", bias: str = "mlp.gate.e_score_correction_bias"
            ) -> tuple[Rule, ...]:  # fmt: skip
    """All arrays but the experts' own."""
    return (
        Rule("model.embed_tokens.weight", "embed/weight"),
        Rule("model.norm.weight", "norm/weight"),
        Rule("lm_head.weight", "head/weight"),
        *(Rule(f"{_L}{theirs}", f"layers/{ours}") for theirs, ours in _IN_LAYER.items()),
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
