"""A tiny MoE model of torchtitan, trained for some steps and saved, all by torchtitan's own code.

    python -m tests.support.peers.titan KIND FOLDER [BEGIN]

KIND is ``deepseek_v3``, with latent attention, a dense first layer and shared experts, or ``qwen3``
with grouped-query attention in one fused product. FOLDER gets ``checkpoint/step-N`` and
``expected.pt``: a batch of tokens [2, 24], the logits of it [2, 24, vocabulary] after these steps,
the losses of further steps (``continued``), and those of steps with a new optimizer (``losses``),
before each of them. With BEGIN, a folder with ``checkpoint/step-N``, the run goes on from there,
and FOLDER gets ``resumed.pt``, with ``continued`` alone.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, STEPS = 320, 3


def deepseek_v3() -> nn.Module:
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear
    from torchtitan.models.common.nn_modules import RMSNorm
    from torchtitan.models.deepseek_v3 import DeepSeekV3Model, _build_dsv3_layers

    made: Any = {"weight": nn.init.ones_}
    rope = ComplexRoPE.Config(
        dim=8, max_seq_len=64, theta=10000.0, scaling="yarn", rope_factor=4.0, beta_fast=32.0,
        beta_slow=1.0, original_seq_len=16,
    )  # fmt: skip
    layers = _build_dsv3_layers(
        n_layers=3, n_dense_layers=1, dim=32, n_heads=4, q_lora_rank=12, kv_lora_rank=16,
        qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, mscale=0.7, dense_hidden_dim=40,
        moe_hidden_dim=16, num_experts=8, num_shared_experts=2, router_top_k=3,
        router_score_func="sigmoid", router_num_expert_groups=4, router_num_limited_groups=2,
        router_route_scale=2.5, router_route_norm=True, attn_backend="flex",
        moe_comm_backend="standard", non_blocking_capacity_factor=None, rope=rope,
    )  # fmt: skip
    return DeepSeekV3Model(
        DeepSeekV3Model.Config(
            vocab_size=VOCAB, dim=32, layers=layers, mtp_layers=[],
            norm=RMSNorm.Config(normalized_shape=32, param_init=made),
            tok_embeddings=Embedding.Config(
                num_embeddings=VOCAB, embedding_dim=32, param_init=made
            ),
            lm_head=Linear.Config(in_features=32, out_features=VOCAB, param_init=made),
        )
    )  # fmt: skip


def qwen3() -> nn.Module:
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear
    from torchtitan.models.qwen3 import Qwen3Model, _build_qwen3_moe_layers, _qwen3_norm

    made: Any = {"weight": nn.init.ones_}
    layers = _build_qwen3_moe_layers(
        n_layers=2, dim=32, n_heads=4, n_kv_heads=2, head_dim=12, moe_hidden_dim=16,
        num_experts=8, top_k=2, fuse_qkv=True, attn_backend="flex", moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=12, max_seq_len=64, theta=700.0),
    )  # fmt: skip
    return Qwen3Model(
        Qwen3Model.Config(
            vocab_size=VOCAB, dim=32, norm=_qwen3_norm(32), layers=layers,
            tok_embeddings=Embedding.Config(
                num_embeddings=VOCAB, embedding_dim=32, param_init=made
            ),
            lm_head=Linear.Config(in_features=32, out_features=VOCAB, param_init=made),
        )
    )  # fmt: skip


def prepared(model: nn.Module) -> nn.Module:
    """With random weights, in float32, and attention for a CPU: torchtitan's casts of experts to
    bfloat16 are taken out, and the attention is its own that needs neither GPU nor compiler."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    from bench.peers import titan_experts_in_float32

    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.05)
            if "norm" in name:
                parameter.add_(1.0)
        for name, buffer in model.named_buffers():
            if name.endswith(("expert_bias_E", "tokens_per_expert_E")):
                buffer.zero_()
    titan_experts_in_float32(model)
    for module in list(model.modules()):
        if hasattr(module, "inner_attention"):
            module.inner_attention = ScaledDotProductAttention.Config().build()
    return model


class Run:
    """A model with torchtitan's optimizer, schedule and hook that balances experts."""

    def __init__(self, kind: str) -> None:
        from torchtitan.components.optimizer import (
            LRSchedulersContainer,
            default_adamw,
            register_moe_load_balancing_hook,
        )

        self.model = prepared({"deepseek_v3": deepseek_v3, "qwen3": qwen3}[kind]())
        config = default_adamw(lr=1e-2)
        config.implementation = "for-loop"
        self.optimizers = config.build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=1, total_steps=10).build(
            optimizers=self.optimizers, training_steps=10
        )
        one_rank = types.SimpleNamespace(
            get_optional_mesh=lambda name: None, ep_enabled=False, tp=1
        )  # fmt: skip
        register_moe_load_balancing_hook(self.optimizers, [self.model], one_rank)
        self.tokens_BS = torch.randint(VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))
        self.counters = Counters()

    def manager(self, folder: Path) -> Any:
        from torchtitan.components.checkpointer.dcp import CheckpointManager

        return CheckpointManager(
            CheckpointManager.Config(
                enable=True, interval=STEPS, keep_latest_k=0, exclude_from_loading=["dataloader"]
            ),
            dataloader=None, model_parts=[self.model], optimizers=self.optimizers,
            lr_schedulers=self.schedulers, states={"train_state": self.counters},
            sd_adapter=None, base_folder=str(folder),
        )  # fmt: skip

    def backward(self) -> float:
        logits_TV = self.model(self.tokens_BS[:, :-1]).float().flatten(0, 1)
        loss = F.cross_entropy(logits_TV, self.tokens_BS[:, 1:].flatten())
        loss.backward()
        return loss.item()

    def steps(self) -> list[float]:
        """The losses of some steps, before each of them."""
        losses = []
        for _ in range(STEPS):
            losses.append(self.backward())
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad()
            self.counters.step += 1
            self.counters.ntokens_seen += 46
        return losses


class Counters:
    """What torchtitan's trainer saves of itself."""

    step = 0
    ntokens_seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


def main(kind: str, folder: Path, begin: Path | None = None) -> None:
    torch.set_num_threads(1)
    run = Run(kind)
    if begin is not None:
        manager = run.manager(begin)
        assert manager.load(step=STEPS)
        assert (run.counters.step, run.counters.ntokens_seen) == (STEPS, 46 * STEPS)
        torch.save({"continued": run.steps()}, folder / "resumed.pt")
        return
    run.steps()
    manager = run.manager(folder)
    assert manager.save(STEPS)
    manager.close()
    start = {name: value.clone() for name, value in run.model.state_dict().items()}
    with torch.no_grad():
        logits_BSV = run.model(run.tokens_BS).float()
    found = {"tokens": run.tokens_BS, "logits": logits_BSV, "continued": run.steps()}
    run.model.load_state_dict(start)
    losses, new = [], torch.optim.AdamW(run.model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        new.zero_grad()
        losses.append(run.backward())
        new.step()
    torch.save({**found, "losses": losses}, folder / "expected.pt")


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
