"""torchtitan: a torch.distributed.checkpoint folder, ``outputs/checkpoint/step-N``.

Read from torchtitan 0.3.0: models/common/{attention,moe}.py, components/checkpointer/dcp.py,
components/optimizer.py, trainer.py. Up to 0.2 experts and the head had other names.

Legend: L layers, E experts, D d_model, F d_ff.
"""

from __future__ import annotations

import re
from pathlib import Path

from ckpt.interop import DcpSource, DcpTarget, is_dcp
from ckpt.rewrite import Selected, Target
from convoy.convert.formats import flat_optimizer
from convoy.convert.formats.flat_optimizer import Parameters, value_of
from convoy.convert.formats.links import Link, Linked
from convoy.convert.formats.names import DOWN, GATE, ROUTER_BIAS, UP
from convoy.convert.formats.opened import Declared, Fixed, Opened, Raw, Together, opened
from convoy.convert.formats.rules import QKV, Kind, Naming, Rule, lay_out
from convoy.convert.formats.state import Training
from parallel.layout import Topology

_L = "layers.{layer}."
_NAMING = Naming(
    moment="optimizer.state.{p}.{moment}", moments=("exp_avg", "exp_avg_sq", "momentum_buffer")
)
_FUSED = _L + "attention.qkv_linear.wqkv.weight"
_ROLES = {"w1": "w_gate", "w2": "w_down", "w3": "w_up"}


def _rules(head: str, experts: dict[str, str], bias: str, attention: tuple[Rule, ...]) -> Kind:
    feed_forwards = {"feed_forward": "ffn", "moe.shared_experts": "moe/shared_experts"}
    return Kind(
        (
            Rule("tok_embeddings.weight", "embed/weight"),
            Rule("norm.weight", "norm/weight"),
            Rule(f"{head}.weight", "head/weight"),
            Rule(_L + "attention_norm.weight", "layers/attention_norm/weight"),
            Rule(_L + "ffn_norm.weight", "layers/ffn_norm/weight"),
            *attention,
            Rule(_L + "attention.wo.weight", "layers/attention/wo/weight"),
            *(
                Rule(f"{_L}{network}.{matrix}.weight", f"layers/{ours}/{role}/weight")
                for network, ours in feed_forwards.items()
                for matrix, role in _ROLES.items()
            ),
            Rule(_L + "moe.router.gate.weight", "layers/moe/router/weight"),
            Rule(f"{_L}moe.{bias}", ROUTER_BIAS, of="buffer"),
            *(
                Rule(f"{_L}moe.{experts[matrix]}", ours, turned=True)
                for matrix, ours in (("w1", GATE), ("w2", DOWN), ("w3", UP))
            ),
        ),
        _NAMING,
    )


def _separate(prefix: str, **only: str) -> tuple[Rule, ...]:
    return tuple(
        Rule(f"{_L}attention.{prefix}w{which}.weight", ours, of=only.get("of", "all"))  # type: ignore[arg-type]
        for which, ours in zip("qkv", QKV, strict=True)
    )


_HEAD_NORMS = tuple(
    Rule(f"{_L}attention.{name}.weight", f"layers/attention/{name}/weight")
    for name in ("q_norm", "k_norm")
)
_LATENT = (
    *(
        Rule(f"{_L}attention.{name}.weight", f"layers/attention/{name}/weight")
        for name in ("wq", "wq_a", "wq_b", "wkv_a", "wkv_b")
    ),
    Rule(_L + "attention.q_norm.weight", "layers/attention/q_a_norm/weight"),
    Rule(_L + "attention.kv_norm.weight", "layers/attention/kv_a_norm/weight"),
)
_NEW = {"w1": "w1_EFD", "w2": "w2_EDF", "w3": "w3_EFD"}
_NEW = {matrix: f"routed_experts.inner_experts.{name}" for matrix, name in _NEW.items()}
_OLD = {matrix: f"experts.{matrix}" for matrix in _ROLES}
# The module of fused queries, keys and values takes them apart in its own state dict, and the
# optimizer's state has the fused parameter.
_BOTH = (*_separate("qkv_linear.", of="weights"), Rule(_FUSED, QKV, by_group=True, of="moments"))
KINDS = {
    "fused": _rules("lm_head", _NEW, "expert_bias_E", (*_BOTH, *_HEAD_NORMS)),
    "separate": _rules("lm_head", _NEW, "expert_bias_E", (*_separate("qkv_linear."), *_HEAD_NORMS)),
    "latent": _rules("lm_head", _NEW, "expert_bias_E", _LATENT),
    "0.2": _rules("output", _OLD, "expert_bias", (*_separate(""), *_HEAD_NORMS)),
    "0.2-latent": _rules("output", _OLD, "expert_bias", _LATENT),
}
"""With queries, keys and values in one parameter or in three; latent attention; up to 0.2."""


_MODEL = re.compile(r"(tok_embeddings|norm|lm_head|output|layers)\b.*")
_MOMENT = r"optimizer\.state\.(.+)\.(?:exp_avg|exp_avg_sq|momentum_buffer)"
_KNOWN = re.compile(
    r"optimizer\.(state\..+\.step|param_groups\..+)|train_state\..*|lr_scheduler\..*"
)
_BUFFERS = re.compile(r".*\.tokens_per_expert(_E)?|.*freqs_cis|rope\..*")


class Torchtitan(Declared):
    """See :class:`convoy.convert.formats.opened.Format`."""

    name, kinds = "torchtitan", KINDS

    def is_one(self, path: Path) -> bool:
        """See Format."""
        return is_dcp(path) and "tok_embeddings.weight" in DcpSource(path).arrays

    def open(self, path: Path, num_heads: int | None, step: int | None = None) -> Opened:
        """See Format."""
        source, where = DcpSource(path), str(path)
        names = [
            name
            for name in source.arrays
            if (_MODEL.fullmatch(name) or re.fullmatch(_MOMENT, name))
            and not _BUFFERS.fullmatch(name)
        ]
        others = [*(set(source.arrays) - set(names)), *source.left_out]
        behind = [name for name in others if not _KNOWN.fullmatch(name)]

        def training(links: list[Link]) -> Training:
            parameters = Parameters.of(links, _MOMENT)
            step, tokens, position = (
                None if value is None else int(value)
                for value in (
                    value_of(source, name)
                    for name in (
                        "train_state.step", "train_state.ntokens_seen", "lr_scheduler.last_epoch"
                    )
                )
            )  # fmt: skip
            fields = flat_optimizer.read(source, "optimizer", parameters, where)
            if step is None:
                step = fields["updates"] if fields["updates"] is not None else position
            return Training(step or 0, tokens=tokens or None, position=position, **fields)

        raw = Raw(Selected(source, {name: name for name in names}), training, behind)
        return opened(self.name, KINDS, raw, where, num_heads)

    def target(self, source: Opened, kind: str, folder: Path, num_heads: int | None) -> Target:
        """See Format."""
        layout = lay_out(KINDS[kind], source.arrays, num_heads)
        theirs = Linked(source, layout.links, layout.arrays, "theirs", source.info)
        training = source.training
        parameters = Parameters.of(layout.links, _MOMENT)
        steps, objects = flat_optimizer.write("optimizer", parameters, training, self.name)
        position = training.step if training.position is None else training.position
        objects |= {
            "train_state.step": training.step,
            "train_state.ntokens_seen": training.tokens or 0,
            "lr_scheduler.last_epoch": position,
        }
        fixed = Fixed(steps, f"steps {training.updates}")
        together = Together([("", theirs), ("", fixed)], theirs.info)
        return DcpTarget(together, folder, Topology(), objects=objects, beside={})
