"""Training tiny mixture-of-experts decoders: weights, moments and counters as plain arrays.

Legend: L layers, E experts, D d_model, F d_ff.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from moe import MoEConfig
from parallel import Topology
from pretrain.model import Decoder, ModelConfig, init_parameters
from pretrain.optim import OptimizerConfig, build_optimizer, moments
from pretrain.optim.config import AdamWConfig, MuonConfig
from pretrain.parallelize import parameter_layouts
from pretrain.state.names import array_path, split_layer

Arrays = dict[str, np.ndarray]
MODEL: dict[str, Any] = {
    "vocab_size": 260, "d_model": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1,
}  # fmt: skip
MOE: dict[str, Any] = {"num_experts": 8, "top_k": 2, "d_ff": 32}


@dataclass(frozen=True)
class Case:
    """One training: what differs from the smallest one."""

    model: Mapping[str, Any] = field(default_factory=dict)
    moe: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    steps: int = 60
    lr: float = 1e-2
    optimizer: str = "adamw"
    frozen: str = ""
    """Parameters whose names have this keep their first values and have no moments."""
    upcycled: bool = False
    """The experts of a layer begin as one."""
    rounded: bool = False
    """The first weights are numbers of bfloat16, as those of an import are."""
    warm: bool = False
    """The first step has a learning rate of 0."""
    starved: str = ""
    """Experts that get no token: ``some``, others in each layer, or ``group``, the second half of
    the first layer alone."""


@dataclass(frozen=True)
class Trained:
    """A model's numbers, under the logical names of a checkpoint."""

    model: ModelConfig
    moe: MoEConfig
    step: int
    arrays: Arrays
    """Float32, layers stacked: weights under ``model/``, moments under ``optimizer/``."""
    layers: Mapping[str, tuple[int, ...]]
    """The numbers of the layers that an array has stacked."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """Of arrays that are not stored in float32."""
    moment_step: int | None = None
    """The step of the moments, where it is not that of the weights."""

    def changed(self, **arrays: np.ndarray) -> Trained:
        """The same with other arrays; names have ``__`` for ``/``."""
        named = {name.replace("__", "/"): values for name, values in arrays.items()}
        return replace(self, arrays={**self.arrays, **named})

    def without_moments(self) -> Trained:
        """The weights alone."""
        kept = {n: a for n, a in self.arrays.items() if not n.startswith("optimizer/")}
        return replace(self, arrays=kept)

    def stored_in(self, dtype: str) -> Trained:
        """The weights in another dtype, rounded once."""
        names = [n for n in self.arrays if n.startswith("model/") and "bias" not in n]
        return replace(self, dtypes=dict.fromkeys(names, dtype))


def batches(seed: int, vocab: int, batch: int = 8, length: int = 32) -> Callable[[], torch.Tensor]:
    """Token sequences of a random Markov chain, whose tokens are of very unequal frequency."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.arange(1, vocab + 1).float() ** -1.1
    following = torch.multinomial(weights.repeat(vocab, 1), 4, generator=generator)

    def draw() -> torch.Tensor:
        tokens = torch.empty(batch, length + 1, dtype=torch.int64)
        tokens[:, 0] = torch.multinomial(weights, batch, True, generator=generator)
        picks = torch.randint(0, 4, (batch, length), generator=generator)
        for i in range(length):
            tokens[:, i + 1] = following[tokens[:, i], picks[:, i]]
        return tokens

    return draw


def train(case: Case, keep: tuple[int, ...] = ()) -> dict[int, Trained]:
    """Train, and return the states after the steps of ``keep`` and after the last one."""
    config = ModelConfig.model_validate({**MODEL, **case.model})
    moe = MoEConfig.model_validate({**MOE, "d_model": config.d_model, **case.moe})
    decoder = Decoder(config, moe)
    layouts = parameter_layouts(decoder, Topology())
    init_parameters(decoder, layouts, 0, case.seed, config.num_layers)
    _begin(decoder, case)
    trainable = {n: p for n, p in decoder.named_parameters() if p.requires_grad}
    kinds = {"adamw": AdamWConfig, "muon": MuonConfig}
    kind: OptimizerConfig = kinds[case.optimizer](lr=case.lr)
    optimizer = build_optimizer(decoder, kind)
    draw = batches(case.seed, config.vocab_size)
    states = {}
    for step in range(case.steps + 1):
        if step in (*keep, case.steps):
            states[step] = _state(decoder, optimizer, config, moe, step, set(trainable))
        if step == case.steps:
            break
        for group in optimizer.param_groups:
            group["lr"] = 0.0 if case.warm and step == 0 else case.lr
        tokens = draw()
        output = decoder(tokens[:, :-1])
        loss = F.cross_entropy(output.logits.flatten(0, 1), tokens[:, 1:].flatten())
        for aux in output.aux:
            loss = loss + aux.aux_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for block, aux in zip(_moe_blocks(decoder), output.aux, strict=True):
            if moe.expert_bias and moe.bias_update_rate:
                block.moe.router.update_bias(aux.expert_counts_E)
    return states


def _moe_blocks(decoder: Decoder) -> list[Any]:
    return [block for block in decoder.blocks.values() if block.moe is not None]


def _begin(decoder: Decoder, case: Case) -> None:
    with torch.no_grad():
        if case.starved:
            _starve(decoder, case)
        for name, parameter in decoder.named_parameters():
            if case.upcycled and ".experts.w_" in name:
                parameter.copy_(parameter[:1].expand_as(parameter).clone())
            if case.rounded:
                parameter.copy_(parameter.bfloat16().float())
            if case.frozen and case.frozen in name:
                parameter.requires_grad_(False)


def _starve(decoder: Decoder, case: Case) -> None:
    """Biases that no score overcomes, as after a collapse."""
    for i, block in enumerate(_moe_blocks(decoder)):
        count = block.moe.router.weight.shape[0]
        some = sorted({(i + k) % count for k in (1, 4, 6)})
        group = list(range(count // 2, count)) if i == 0 else []
        block.moe.router.expert_bias[some if case.starved == "some" else group] = -10.0


def _state(
    decoder: Decoder, optimizer: Any, config: ModelConfig, moe: MoEConfig, step: int,
    trainable: set[str],
) -> Trained:  # fmt: skip
    tensors = {**dict(decoder.named_parameters()), **dict(decoder.named_buffers())}
    groups = {"model": tensors}
    for key, of in moments(optimizer, decoder).items():
        groups[f"optimizer/{key}"] = {n: t for n, t in of.items() if n in trainable}
    arrays, layers = {}, {}
    for prefix, named in groups.items():
        stacks: dict[str, dict[int, np.ndarray]] = {}
        for name, tensor in named.items():
            path, layer = split_layer(array_path(name))
            values = tensor.detach().float().numpy().copy()
            if layer is None:
                arrays[f"{prefix}/{path}"] = values
            else:
                stacks.setdefault(path, {})[layer] = values
        for path, of in stacks.items():
            arrays[f"{prefix}/{path}"] = np.stack([of[layer] for layer in sorted(of)])
            layers[f"{prefix}/{path}"] = tuple(sorted(of))
    return Trained(config, moe, step, arrays, layers)
