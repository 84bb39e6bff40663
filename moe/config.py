"""The ``[moe]`` section of a job spec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from router import CapacityTraits, OpenKind, RouterConfig, Traits
from router import DroplessConfig as DroplessConfig
from router import FixedCapacityConfig as FixedCapacityConfig
from router import StragglerAwareConfig as StragglerAwareConfig

ActivationName = Literal["swiglu", "geglu", "gelu", "relu2", "swiglu_oai"]
GATED: tuple[ActivationName, ...] = ("swiglu", "geglu", "swiglu_oai")
"""The activation functions with a third matrix product, the gate's."""

Backend = Literal["auto", "loop", "grouped_mm", "packed", "megablocks"]
Gemm = Literal["compute", "float8"]


@dataclass(frozen=True)
class DispatcherTraits(Traits):
    """What rules between options, the planner and the trainer ask of a dispatcher."""

    fixed_size: bool = False
    """Allocates for ``max_tokens_per_call``, which must be given."""
    packs_rows: bool = False
    """Can send rows in float8, see ``dispatch_dtype``."""
    takes_chunks: bool = False
    """Can cut a call's tokens, see ``overlap_chunks``."""
    exact: bool = False
    """Can keep rows apart by micro-batch, for ``train.exact``."""
    once_per_node: bool = False
    """A row crosses to a node once, however many of its experts are there."""


DISPATCHERS = {
    "all_to_all": DispatcherTraits(
        "moe.dispatch.all_to_all:AllToAllDispatcher", packs_rows=True, takes_chunks=True, exact=True
    ),
    "padded_all_to_all": DispatcherTraits(
        "moe.dispatch.padded_all_to_all:PaddedAllToAllDispatcher",
        fixed_size=True,
        packs_rows=True,
        takes_chunks=True,
    ),
    "all_gather": DispatcherTraits("moe.dispatch.all_gather:AllGatherDispatcher"),
    "hierarchical": DispatcherTraits(
        "moe.dispatch.all_to_all:HierarchicalDispatcher",
        packs_rows=True,
        takes_chunks=True,
        once_per_node=True,
    ),
    "deep_ep": DispatcherTraits(
        "moe.dispatch.deep_ep:DeepEPDispatcher",
        fixed_size=True,
        packs_rows=True,
        once_per_node=True,
    ),
}
"""The dispatchers of this repository, one line each."""

DISPATCHER = OpenKind("moe.dispatcher", "Dispatcher of package moe", DISPATCHERS)


class MoEConfig(RouterConfig):
    """The ``[moe]`` section: sizes, compute and dispatch of one MoE layer, and its router.

    Example: ``MoEConfig(d_model=64, d_ff=128, num_experts=8, top_k=2)``, and with a capacity
    ``capacity={"policy": "fixed", "capacity_factor": 1.25}`` or
    ``capacity=FixedCapacityConfig(capacity_factor=1.25)``.
    """

    on_resume: ClassVar[dict[str, str]] = RouterConfig.on_resume | {
        "backend": "fixed if exact", "dispatcher": "fixed if exact", "gemm": "free",
        "recompute_experts": "free", "dispatch_dtype": "free", "overlap_chunks": "free",
        "max_tokens_per_call": "free", "copies": "free",
    }  # fmt: skip

    OF_OTHER_SECTIONS: ClassVar[dict[str, str]] = {
        "d_model": "model.d_model",
        "gemm": "precision.experts",
        "max_tokens_per_call": "batch.micro_batch_size x data.seq_len",
    }
    """Fields that a job spec does not have in ``[moe]``, with what they follow from there."""

    d_model: int = Field(ge=1)
    """The size of the layer's input and output."""
    d_ff: int = Field(ge=1)
    """The hidden size of one expert."""
    activation: ActivationName = "swiglu"
    """The activation function of experts and shared experts (Shazeer, arXiv 2002.05202).
    ``swiglu_oai`` is gpt-oss's: gate · sigmoid(1.702 gate) · (up + 1)."""
    activation_limit: float = Field(default=0.0, ge=0)
    """Clamp the gate's product to at most this, and up's to between minus this and this, before the
    activation function (gpt-oss: 7, DeepSeek-V4: 10); 0 clamps nothing."""
    ffn_bias: bool = False
    """Add biases to the matrix products of experts and shared experts."""
    num_shared_experts: int = Field(default=0, ge=0)
    """The number of experts that every token passes through, computed as one feed-forward layer of
    hidden size num_shared_experts · d_ff (DeepSeekMoE, arXiv 2401.06066)."""
    shared_expert_gate: bool = False
    """Multiply the shared experts' output by sigmoid(x · w) with a learned vector w (Qwen2-MoE)."""

    weights_on_input: bool = False
    """Multiply an expert's input by the weight of the choice, and not its output (Llama 4). A token
    then travels once for each of its experts, and not once for each rank."""

    backend: Backend = "auto"
    """How experts are computed. ``loop``: two or three GEMMs for each expert. ``grouped_mm``:
    PyTorch's grouped GEMM. ``packed``: the fastest on a CPU. ``megablocks``: MegaBlocks' sort,
    gather, scatter and grouped GEMM, on CUDA in bfloat16. ``auto``: the fastest of them that the
    device, the dtype and the sizes allow, without ``megablocks``."""
    gemm: Gemm = "compute"
    """What the routed experts' GEMMs compute in. ``compute``: the dtype of the experts' parameters,
    or autocast's. ``float8``: e4m3 with scales of tiles, see docs/layer.md; the rest of the
    layer stays as it is."""
    recompute_experts: bool = False
    """Keep only the experts' input for the backward, and compute the experts' GEMMs again."""
    dispatcher: Annotated[str, AfterValidator(DISPATCHER.check), DISPATCHER] = "all_to_all"
    """How routed tokens reach the experts of other ranks. ``all_to_all``: all-to-all with splits of
    the exact size. ``padded_all_to_all``: all-to-all with equal splits, without waiting for an
    accelerator. ``all_gather``: every rank gets all tokens. ``hierarchical``: a token crosses to
    a node once, and is then distributed within that node. ``deep_ep``: DeepEP's kernels, on CUDA in
    bfloat16, where DeepEP 2 is installed. Or a class derived from ``moe.Dispatcher``."""
    dispatch_dtype: Gemm = "compute"
    """What rows travel to experts in: ``compute``, the dtype of the layer's input, or ``float8``,
    with a scale for each 128 numbers of a row (DeepSeek-V3, arXiv 2412.19437, section 3.3.3).
    Outputs of experts and all gradients travel in the dtype of compute."""
    overlap_chunks: int = Field(default=1, ge=1)
    """Cut the tokens of a call into this many chunks: experts compute one chunk while the next is
    in transfer."""
    max_tokens_per_call: int = Field(default=0, ge=0)
    """For ``padded_all_to_all`` and ``deep_ep``: the most tokens that one rank brings to one
    call."""

    copies: int = Field(default=0, ge=0)
    """The most experts of other ranks of which one rank computes a copy, in one call. Rows of hot
    experts, and with ``straggler_aware`` capacity rows of slow ranks, are then computed by copies
    on ranks that would wait: no token is moved to another expert, and none is dropped for its rank.
    0 makes no copies."""

    @property
    def dispatcher_traits(self) -> DispatcherTraits:
        """What other rules may ask of the dispatcher."""
        return DISPATCHER.traits(self.dispatcher)

    @property
    def activation_key(self) -> str:
        """The activation function with its limit: a key of ``moe.experts.ACTIVATIONS``."""
        limit = self.activation_limit
        return f"{self.activation}@{limit!r}" if limit else self.activation

    @property
    def independent_tokens(self) -> bool:
        """Whether a token's output depends on no other token that is routed with it."""
        return self.routing_traits.top_k_in_evaluation and not self.capacity_traits.bounded

    @property
    def capacity_traits(self) -> CapacityTraits:
        """What other rules may ask of the capacity: with copies, ranks have none."""
        traits = self.capacity.traits
        return traits.with_copies if self.copies else traits

    @model_validator(mode="after")
    def _check_moe(self) -> Self:
        if self.shared_expert_gate and not self.num_shared_experts:
            raise ValueError(
                "moe.shared_expert_gate (true) must have moe.num_shared_experts (0) at least 1"
            )
        if self.activation_limit and self.activation not in GATED:
            raise ValueError(
                f"moe.activation ({self.activation}) must be {', '.join(GATED)} with "
                f"moe.activation_limit ({self.activation_limit}): there is no gate to clamp"
            )
        if self.gemm == "float8" and self.backend not in ("auto", "loop"):
            raise ValueError(
                f"moe.backend ({self.backend}) must be auto or loop with moe.gemm (float8): the "
                f"others have no products in float8"
            )
        traits = self.dispatcher_traits
        if traits.fixed_size != bool(self.max_tokens_per_call):
            fixed_size = [name for name, kind in DISPATCHERS.items() if kind.fixed_size]
            raise ValueError(
                f"moe.max_tokens_per_call ({self.max_tokens_per_call}) must be above 0 with "
                f"moe.dispatcher ({' or '.join(fixed_size)}), and 0 without ({self.dispatcher})"
            )
        if self.dispatch_dtype == "float8" and not traits.packs_rows:
            raise ValueError(
                f"moe.dispatch_dtype (float8) must be compute with moe.dispatcher "
                f"({self.dispatcher}), which does not pack rows"
            )
        if self.copies and self.overlap_chunks > 1:
            raise ValueError(
                f"moe.overlap_chunks ({self.overlap_chunks}) must be 1 with moe.copies "
                f"({self.copies}): a copy's parameters would travel once for each chunk"
            )
        bound = getattr(self.capacity, "max_tokens_per_rank", 0)
        if self.copies and bound:
            raise ValueError(
                f"moe.capacity.max_tokens_per_rank ({bound}) must be 0 with moe.copies "
                f"({self.copies}): copies take what the bound would move to other experts"
            )
        if self.overlap_chunks > 1 and not traits.takes_chunks:
            raise ValueError(
                f"moe.overlap_chunks ({self.overlap_chunks}) must be 1 with moe.dispatcher "
                f"({self.dispatcher})"
            )
        return self


def check_exact(c: MoEConfig) -> None:
    """Refuse what makes results depend on the number of ranks, whatever is summed exactly.

    Raises ValueError: one line that names the field, its value and the rule.
    """
    bound = getattr(c.capacity, "max_tokens_per_rank", 0)
    exact = [name for name, kind in DISPATCHERS.items() if kind.exact]
    scope = c.aux_loss_scope
    for wrong, field, value, must, why in (
        (c.input_jitter, "input_jitter", c.input_jitter, "0", "each rank draws its own noise"),
        (c.capacity_traits.depends_on_ranks and not bound, "capacity.policy", c.capacity.policy,
         "dropless or fixed, or moe.copies above 0", "capacities are those of ranks"),
        (bound, "capacity.max_tokens_per_rank", bound, "0",
         "which experts share a rank depends on the layout"),
        (scope == "global_batch" and c.aux_loss_coeff, "aux_loss_scope", scope,
         "previous_step or micro_batch", "the step so far is another on every layout"),
        (not c.dispatcher_traits.exact, "dispatcher", c.dispatcher, " or ".join(exact),
         "only there rows stay apart by micro-batch"),
        (c.overlap_chunks > 1, "overlap_chunks", c.overlap_chunks, "1",
         "chunks cut a micro-batch where ranks exchange rows, and nowhere else"),
        (c.gemm == "float8", "gemm", c.gemm, "compute",
         "a scale is of rows that other micro-batches may have brought"),
        (c.dispatch_dtype == "float8", "dispatch_dtype", c.dispatch_dtype, "compute",
         "exact sums exchange unpacked rows"),
        (c.backend in ("grouped_mm", "megablocks"), "backend", c.backend, "auto, packed or loop",
         "groups are experts, with the rows of all micro-batches"),
    ):  # fmt: skip
        if wrong:
            raise ValueError(f"moe.{field} ({value}) must be {must} with train.exact (true): {why}")
