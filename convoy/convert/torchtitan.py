"""The weights of torchtitan's models under the names, and in the shapes, that Convoy's have.

Legend: L layers, E experts, D d_model, F d_ff.
"""

from __future__ import annotations

import re

from ckpt.format import renamed
from ckpt.rewrite import Selected, Source, Transposed
from pretrain.errors import InputError
from pretrain.state import MODEL, is_expert_matrix

_ATTENTION = r"layers/attention/(?:qkv_linear/)?"
_EXPERTS = r"layers/moe/(?:experts|routed_experts/inner_experts)/"
_ROLES = {"w1": "w_gate", "w2": "w_down", "w3": "w_up"}
# Names of stacked arrays up to torchtitan 0.2, and of 0.3.
_NAMES = (
    (r"tok_embeddings/weight", "embed/weight"),
    (r"norm/weight", "norm/weight"),
    (r"(?:output|lm_head)/weight", "head/weight"),
    (r"layers/(attention_norm|ffn_norm)/weight", r"layers/\1/weight"),
    (_ATTENTION + r"(wq|wk|wv|wo|q_norm|k_norm)/weight", r"layers/attention/\1/weight"),
    (_ATTENTION + r"(wq_a|wq_b|wkv_a|wkv_b)/weight", r"layers/attention/\1/weight"),
    (_ATTENTION + r"kv_norm/weight", "layers/attention/kv_a_norm/weight"),
    (r"layers/feed_forward/(w[123])/weight", r"layers/ffn/\1/weight"),
    (r"layers/moe/shared_experts/(w[123])/weight", r"layers/moe/shared_experts/\1/weight"),
    (r"layers/moe/router/gate/weight", "layers/moe/router/weight"),
    (r"layers/moe/expert_bias(?:_E)?", "layers/moe/router/expert_bias"),
    (_EXPERTS + r"(w[123])(?:_EFD|_EDF)?", r"layers/moe/experts/\1"),
)
_NO_WEIGHTS = re.compile(
    r"(optimizer|lr_scheduler|dataloader|train_state)/.*|.*/tokens_per_expert(_E)?|.*freqs_cis"
)
_ROLE = re.compile(r"\bw[123]\b")


def from_titan(source: Source) -> Source:
    """The weights of a torchtitan checkpoint whose layers are stacked; the rest stays behind.

    Experts' matrices are [L, E, out, in] in torchtitan and [L, E, in, out] in Convoy. torchtitan's
    Llama has rotary pairs side by side: set ``model.rope_interleaved`` in the spec to train with.

    Raises InputError, naming the array, for an array of a model that is not known. Known are models
    with grouped-query attention or latent attention, dense or with experts.
    """
    names = {}
    for name in source.arrays:
        if _NO_WEIGHTS.fullmatch(name) is None:
            names[name] = f"{MODEL}{_ROLE.sub(lambda m: _ROLES[m[0]], _ours(name))}"
    if "layers/attention/wq_a/weight" in names:  # latent attention: the norm of queries' latent
        q_norm = "layers/attention/q_norm/weight"
        names[q_norm] = f"{MODEL}layers/attention/q_a_norm/weight"
    picked = Selected(source, {name: name for name in names})
    made = Selected(picked, renamed(names, names))
    return Transposed(made, [name for name in made.arrays if is_expert_matrix(name)])


def _ours(name: str) -> str:
    for pattern, ours in _NAMES:
        match = re.fullmatch(pattern, name)
        if match is not None:
            return match.expand(ours)
    raise InputError(f"--family torchtitan: array {name} is of no model that is known")
