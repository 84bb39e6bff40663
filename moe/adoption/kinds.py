"""What a family's declaration says of its MoE blocks: where parameters are, and what is computed.

A path, such as ``gate.weight``, names an attribute of the block. ``transformers`` is not imported.

Legend: E experts, D d_model, F d_ff.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any


@dataclass(frozen=True)
class Layout:
    """How a block's experts keep their parameters; names are within ``block.experts``."""

    gate_up: tuple[str, ...] = ("gate_up_proj",)
    """One tensor with gates and ups, or that of the gates and that of the ups; for experts without
    a gate that of the ups."""
    down: str = "down_proj"
    fused: bool = True
    """One tensor has gates and ups, the gates first: [E, 2 F, D]."""
    input_first: bool = False
    """The input's dim comes before the output's: [E, D, 2 F] and [E, F, D]; not [E, 2 F, D] and
    [E, D, F]."""
    interleaved: bool = False
    """Gates and ups take turns, and not all gates first."""
    flat: bool = False
    """Experts are below each other in matrices: [E F, D], down as well."""
    biases: tuple[str, ...] = ()
    """That of gates and ups [E, 2 F], and that of down [E, D]; laid out as the matrices."""

    @property
    def names(self) -> tuple[str, ...]:
        """All parameters."""
        return (*self.gate_up, self.down, *self.biases)


FUSED = Layout()
INPUT_FIRST = Layout(input_first=True)
UNGATED = Layout(gate_up=("up_proj",), fused=False)
FLAT = Layout(gate_up=("mlp.w1", "mlp.v1"), down="mlp.w2", fused=False, flat=True)
_BIASES = ("gate_up_proj_bias", "down_proj_bias")
WITH_BIASES = Layout(input_first=True, biases=_BIASES)
INTERLEAVED = Layout(input_first=True, interleaved=True, biases=_BIASES)


@dataclass(frozen=True)
class Must:
    """A value that a block must have for its declaration to be true."""

    path: str
    values: tuple[Any, ...]
    """Those that are allowed; the first is the one that an error names."""
    label: str
    """The field of the config of ``transformers``."""
    why: str


JITTER = Must(
    ".jitter_noise", (0, None), "router_jitter_noise",
    "transformers also multiplies the experts' input by the noise, and Convoy has no such option",
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """What the MoE blocks of one or more families are, as data.

    A field that takes a path or a value takes the path as a string that begins with a dot.
    """

    gate: str = "gate"
    """The router's module, within the block."""
    weight: str = "weight"
    """Of the router, [E, D], within its module."""
    logit_bias: str = ""
    """Added to the logits, within the router's module; empty for none."""
    correction: str = ""
    """The bias of the choice alone, within the block; absent where the attribute is."""
    table: str = ""
    """The experts of each token id, [V, K] int64, within the router's module: used instead of a
    choice where the attribute is there."""
    top_k: str = ".gate.top_k"

    score: str = "softmax"
    """``softmax``, ``sigmoid``, ``sqrtsoftplus``, or the path of such a name."""
    after_topk: bool = False
    """A softmax is one of the chosen logits."""
    normalize: str | bool = False
    """Weights are scaled to a sum of 1."""
    scale: str | float = 1.0
    """On the weights; the path of None counts as 1."""
    groups: tuple[str, str] | None = None
    """The numbers of groups, and of a token's groups; paths of None for one group."""
    per_group: int = 2
    """A group's score is the sum of this many of its best."""
    logits_at: int = 0
    """The place of the logits among the outputs of the router of ``transformers``."""

    experts: Layout = FUSED
    on_input: bool = False
    """The weights multiply the experts' input."""
    activation: str = ""
    """``swiglu_oai``, or empty for that of the experts' ``act_fn``."""
    limit: str = ""
    """The path of the clamp of gates and ups; empty, or the path of None, for none."""

    shared: str = ""
    """The module that all tokens pass through, within the block; absent where the attribute is."""
    shared_gate: str = ""
    """The linear map whose sigmoid multiplies the shared module's output."""
    halved: str = ""
    """The path of a word; ``average`` halves the sum of routed and shared output."""
    after: str = ""
    """A module that the sum of routed and shared output passes through."""
    pair: bool = False
    """The block gives two outputs, the second of which its model does not use: None here."""

    sees_mask: bool = True
    """The decoder layers of the blocks are given the attention mask. Without it padding is routed
    as tokens are, as in ``transformers``."""

    must: tuple[Must, ...] = ()


def value(block: Any, path: Any) -> Any:
    """What is at a path that begins with a dot, None where nothing is; any other value itself."""
    if not isinstance(path, str) or not path.startswith("."):
        return path
    try:
        return attrgetter(path[1:])(block)
    except AttributeError:
        return None


@dataclass(frozen=True)
class Family:
    """A model family of ``transformers`` with routed experts."""

    model_type: str
    """As in a ``config.json``, and the folder of ``transformers.models``."""
    name: str
    """For people."""
    block: str
    """The class of its MoE blocks."""
    kind: Kind | None = None
    why_not: str = ""
    """Why its blocks cannot be adopted, one sentence; empty where they can."""

    @property
    def adopt(self) -> bool:
        """Whether ``moe.adopt`` takes its blocks."""
        return self.kind is not None

    @property
    def full_name(self) -> str:
        """Of the class of its blocks."""
        return f"transformers.models.{self.model_type}.modeling_{self.model_type}.{self.block}"
