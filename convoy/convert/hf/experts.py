"""Lines of a family's declaration about its MoE layers, see :mod:`convoy.convert.hf.fields`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from convoy.convert.hf.expressed import Expressed
from convoy.convert.hf.fields import Line, Names, Values
from convoy.convert.hf.model_config import HFConfig
from pretrain.errors import InputError


@dataclass(frozen=True)
class Weighting(Line):
    """How many experts a token has, and whether their weights are scaled to a sum of 1.

    The normalized weight of a single expert is 1. Convoy says that as a softmax over the chosen
    logits, because ``norm_topk_prob`` with one expert is most often a mistake; sigmoids have no
    such form.
    """

    flag: str | None = "norm_topk_prob"
    """The name of the value that says so; None in a family whose weights always are."""
    default: bool = False
    count: str = "num_experts_per_tok"
    sigmoid: bool = False

    @property
    def names(self) -> Names:
        flag = () if self.flag is None else (self.flag,)
        return {"moe.top_k": (self.count,), "moe.norm_topk_prob": flag}

    @property
    def defaults(self) -> Values:
        return {} if self.flag is None else {self.flag: self.default}

    def read(self, config: HFConfig) -> Values:
        top_k = config.size(self.count)
        normalized = self.flag is None or config.flag(self.flag, self.default)
        alone = normalized and top_k == 1
        if alone and self.sigmoid:
            flag = "normalized weights" if self.flag is None else f"{self.flag} (true)"
            raise config.wrong(self.count, f"be at least 2 with {flag}")
        softmax = {"moe.softmax_after_topk": True} if alone else {}
        return {"moe.top_k": top_k, "moe.norm_topk_prob": normalized and not alone, **softmax}

    def needs(self) -> Mapping[str, tuple[Any, ...]]:
        return {"moe.norm_topk_prob": (True,) if self.flag is None else (True, False)}

    def write(self, decoder: Expressed) -> Values:
        normalized = {self.flag: decoder.value("moe.norm_topk_prob")} if self.flag else {}
        return {self.count: decoder.value("moe.top_k"), **normalized}


@dataclass(frozen=True)
class Groups(Line):
    """Groups of experts, whose score is the sum of the two best of each (DeepSeek-V3)."""

    default: int | None = None
    """Of the groups of a config.json that names none, and of the groups of a token."""
    names: ClassVar[Names] = {
        "moe.n_groups": ("n_group",), "moe.topk_groups": ("topk_group",), "moe.topk_per_group": (),
    }  # fmt: skip

    @property
    def defaults(self) -> Values:
        return {} if self.default is None else {"n_group": self.default, "topk_group": self.default}

    def read(self, config: HFConfig) -> Values:
        return {
            "moe.n_groups": config.size("n_group", self.default),
            "moe.topk_groups": config.size("topk_group", self.default),
            "moe.topk_per_group": 2,
        }

    def needs(self) -> Mapping[str, tuple[Any, ...]]:
        return {"moe.topk_per_group": (2, None)}

    def write(self, decoder: Expressed) -> Values:
        moe = decoder.moe
        assert moe is not None
        if moe.num_experts // moe.n_groups < 2:
            raise InputError(
                f"moe.num_experts ({moe.num_experts}) must be at least 2 for each of moe.n_groups "
                f"({moe.n_groups}) to be a {decoder.model_type} model"
            )
        return {"n_group": moe.n_groups, "topk_group": moe.topk_groups}


@dataclass(frozen=True)
class LimitedGroups(Line):
    """Groups of experts, whose score is that of their best one; ``topk_method`` says whether there
    are any (DeepSeek-V2, arXiv 2405.04434, section 2.2.2)."""

    names: ClassVar[Names] = Groups.names

    def read(self, config: HFConfig) -> Values:
        config.must("topk_method", "greedy", "group_limited_greedy")
        limited = config.values.get("topk_method") == "group_limited_greedy"
        return {
            "moe.n_groups": config.size("n_group") if limited else 1,
            "moe.topk_groups": config.size("topk_group") if limited else 1,
            "moe.topk_per_group": 1,
        }

    def needs(self) -> Mapping[str, tuple[Any, ...]]:
        return {"moe.topk_per_group": (1, None)}

    def write(self, decoder: Expressed) -> Values:
        moe = decoder.moe
        assert moe is not None
        method = "greedy" if moe.n_groups == 1 else "group_limited_greedy"
        return {"n_group": moe.n_groups, "topk_group": moe.topk_groups, "topk_method": method}


@dataclass(frozen=True)
class SequenceBalance(Line):
    """One coefficient, of the loss over a sequence or of that over a batch (DeepSeek-V2)."""

    names: ClassVar[Names] = {
        "moe.aux_loss_coeff": ("aux_loss_alpha",), "moe.seq_aux_loss_coeff": ("aux_loss_alpha",),
    }  # fmt: skip

    def read(self, config: HFConfig) -> Values:
        balance, by_sequence = config.number("aux_loss_alpha", 0.001), config.flag("seq_aux", True)
        return {
            "moe.aux_loss_coeff": 0.0 if by_sequence else balance,
            "moe.seq_aux_loss_coeff": balance if by_sequence else 0.0,
        }

    def write(self, decoder: Expressed) -> Values:
        moe = decoder.moe
        assert moe is not None
        by_sequence = moe.seq_aux_loss_coeff > 0 or moe.aux_loss_coeff == 0
        alpha = moe.seq_aux_loss_coeff if by_sequence else moe.aux_loss_coeff
        return {"aux_loss_alpha": alpha, "seq_aux": by_sequence}


@dataclass(frozen=True)
class SharedSize(Line):
    """The hidden size of all shared experts, a multiple of that of a routed one."""

    theirs: str
    routed: str
    """What config.json calls the hidden size of a routed expert."""
    default: int | None = None
    least: int = 1

    @property
    def names(self) -> Names:
        return {"moe.num_shared_experts": (self.theirs,)}

    @property
    def defaults(self) -> Values:
        return {} if self.default is None else {self.theirs: self.default}

    def read(self, config: HFConfig) -> Values:
        size, routed = config.size(self.theirs, self.default), config.size(self.routed)
        if routed == 0 or size % routed or size // routed < self.least:
            raise config.wrong(self.theirs, f"be a multiple of {self.routed} ({routed})")
        return {"moe.num_shared_experts": size // routed}

    def write(self, decoder: Expressed) -> Values:
        moe = decoder.moe
        assert moe is not None
        if moe.num_shared_experts < self.least:
            raise decoder.wrong("moe.num_shared_experts", f"be at least {self.least}")
        return {self.theirs: moe.num_shared_experts * moe.d_ff}


class _DenseLayers(Line):
    """The first layers, which are dense, and their hidden size; no other layer is dense."""

    names: ClassVar[Names] = {
        "model.d_ff": ("intermediate_size",),
        "model.first_k_dense": ("first_k_dense_replace", "mlp_only_layers", "mlp_layer_types",
                                "moe_layer_start_index"),
    }  # fmt: skip

    def count(self, config: HFConfig) -> int:
        """How many there are."""
        raise NotImplementedError

    def said(self, count: int, layers: int) -> Values:
        """The same in a config.json of a model of ``layers`` layers."""
        raise NotImplementedError

    def read(self, config: HFConfig) -> Values:
        count = self.count(config)
        size = {"model.d_ff": config.size("intermediate_size")} if count else {}
        return {"model.first_k_dense": count, **size}

    def write(self, decoder: Expressed) -> Values:
        model, moe = decoder.model, decoder.moe
        assert moe is not None
        size = {"intermediate_size": model.d_ff or moe.d_ff}
        return {**size, **self.said(model.first_k_dense, model.num_layers)}


@dataclass(frozen=True)
class DenseCount(_DenseLayers):
    """``first_k_dense_replace``, their number."""

    default: int = 0

    @property
    def defaults(self) -> Values:
        return {"first_k_dense_replace": self.default}

    def count(self, config: HFConfig) -> int:
        config.must("moe_layer_freq", 1)
        return config.size("first_k_dense_replace", self.default)

    def said(self, count: int, layers: int) -> Values:
        return {"first_k_dense_replace": count, "moe_layer_freq": 1}


class DenseNumbers(_DenseLayers):
    """``mlp_only_layers``, their numbers."""

    def count(self, config: HFConfig) -> int:
        config.must("decoder_sparse_step", 1)
        dense: list[int] = config.values.get("mlp_only_layers", [])
        if dense != list(range(len(dense))):
            raise config.wrong("mlp_only_layers", "be the first layers, in order")
        return len(dense)

    def said(self, count: int, layers: int) -> Values:
        return {"mlp_only_layers": list(range(count)), "decoder_sparse_step": 1}


@dataclass(frozen=True)
class DenseTypes(_DenseLayers):
    """``mlp_layer_types``, ``dense`` or ``sparse`` for each layer."""

    default: int = 1
    """How many of the first layers are dense in a config.json that does not say."""

    def count(self, config: HFConfig) -> int:
        layers = config.size("num_hidden_layers")
        types = config.values.get("mlp_layer_types", self._types(min(self.default, layers), layers))
        count = types.count("dense") if isinstance(types, list) else 0
        if types != self._types(count, layers):
            raise config.wrong("mlp_layer_types", "be dense for first layers, then sparse")
        return count

    def said(self, count: int, layers: int) -> Values:
        return {"mlp_layer_types": self._types(count, layers)}

    @staticmethod
    def _types(dense: int, layers: int) -> list[str]:
        return ["dense"] * dense + ["sparse"] * (layers - dense)


class DenseSpan(_DenseLayers):
    """``moe_layer_start_index`` and ``moe_layer_end_index``, the first and the last MoE layer."""

    defaults: ClassVar[Values] = {"moe_layer_start_index": 1, "moe_layer_interval": 1}

    def count(self, config: HFConfig) -> int:
        config.must("moe_layer_interval", 1)
        config.must("moe_layer_end_index", -1, config.size("num_hidden_layers") - 1)
        return config.size("moe_layer_start_index", 1)

    def said(self, count: int, layers: int) -> Values:
        return {
            "moe_layer_start_index": count,
            "moe_layer_end_index": layers - 1,
            "moe_layer_interval": 1,
        }
