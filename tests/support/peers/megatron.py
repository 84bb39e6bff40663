"""A tiny MoE model of megatron-core, saved by its dist_checkpointing, with its own logits.

    python -m tests.support.peers.megatron KIND FOLDER [NAME=VALUE ...]

KIND is the layout of the checkpoint's keys: ``stacked`` (all layers alike in one tensor),
``layers`` (``non_homogeneous_layers``, here with a dense first layer) or ``singles``
(``singleton_local_shards``: each expert, gate and up a tensor by itself). NAME=VALUE are fields of
its TransformerConfig. FOLDER gets ``checkpoint`` and ``expected.pt``: a batch of tokens [2, 24],
the logits of it [2, 24, vocabulary], and losses of steps that begin there, before each of them.

With ``trained=true`` some steps of AdamW come first, ``checkpoint`` has the optimizer's and the
scheduler's state, and ``expected.pt`` the losses of further steps, ``continued``.
``resume="FOLDER"`` goes on from such a checkpoint, and gives ``resumed.pt``.

``only_save=true`` leaves ``expected.pt`` out. ``from="CHECKPOINT"`` takes the weights of a
checkpoint instead, on the ranks that torchrun started, and only saves: with
``tensor_model_parallel_size=2`` and so on, as another layout of ranks does.
"""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCAB, STEPS = 320, 3
SHARED = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_shared_expert_intermediate_size": 32,
    "moe_shared_expert_gate": True,
    "moe_router_load_balancing_type": "none",
}
KINDS: dict[str, dict[str, Any]] = {
    "stacked": {"moe_layer_freq": 1, "qk_layernorm": False},
    "layers": {"moe_layer_freq": [0, 1], **SHARED},
    "singles": {"moe_layer_freq": [0, 1], **SHARED},
}


def build(kind: str, changes: dict[str, Any]) -> nn.Module:
    """Random weights, the same in every call; all of the layers and experts that this rank has."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    degrees = ("tensor_model_parallel_size", "pipeline_model_parallel_size",
               "expert_model_parallel_size", "expert_tensor_parallel_size")  # fmt: skip
    parallel_state.initialize_model_parallel(**{d: changes[d] for d in degrees if d in changes})
    values: dict[str, Any] = {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2,
        "kv_channels": 12, "ffn_hidden_size": 40, "moe_ffn_hidden_size": 16, "num_moe_experts": 8,
        "moe_router_topk": 2, "moe_router_load_balancing_type": "none", "gated_linear_unit": True,
        "activation_func": F.silu, "add_bias_linear": False, "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-5, "qk_layernorm": True, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "bias_activation_fusion": False, "bias_dropout_fusion": False,
        "masked_softmax_fusion": False, "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False, "use_cpu_initialization": True, "perform_initialization": False,
        "moe_token_dispatcher_type": "allgather", "persist_layer_norm": False,
        "pipeline_dtype": torch.float32,
        **KINDS[kind], **changes,
    }  # fmt: skip
    config = TransformerConfig(**values)
    torch.manual_seed(0)
    model = GPTModel(
        config, get_gpt_decoder_block_spec(config, use_transformer_engine=False), VOCAB, 64,
        position_embedding_type="rope", rotary_base=700, parallel_output=False,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.05)
            if "norm" in name:
                parameter.add_(1.0)
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.normal_(std=0.05)
    return model


@contextmanager
def more_stand_ins() -> Iterator[None]:
    """For a machine without a CUDA device: the writer of checkpoints waits for copies from one, and
    dropout, of which there is none here, has a random state on it."""
    from megatron.core import tensor_parallel

    tracker = types.SimpleNamespace(fork=nullcontext)
    with (
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(tensor_parallel, "get_cuda_rng_tracker", return_value=tracker),
    ):
        yield


def saved(model: nn.Module, kind: str, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    (folder / "checkpoint").mkdir(exist_ok=True)
    state = {"model": sharded(model, kind), "iteration": 7}
    dist_checkpointing.save(state, str(folder / "checkpoint"))


def sharded(model: Any, kind: str) -> dict[str, Any]:
    ways = {
        "non_homogeneous_layers": kind != "stacked",
        "singleton_local_shards": kind == "singles",
    }
    state: dict[str, Any] = model.sharded_state_dict(metadata=ways)
    return state


class Trained:
    """AdamW and Megatron's schedule; its own optimizer in float32 around it, made without the CUDA
    device that its constructor asks for."""

    def __init__(self, model: nn.Module) -> None:
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.optimizer.optimizer import FP32Optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        self.model = model
        marks = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
        matrices = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        self.adam = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": 0.1, "wd_mult": 1.0, **marks},
                {"params": others, "weight_decay": 0.0, "wd_mult": 0.0, **marks},
            ],
            lr=1e-2, betas=(0.9, 0.95),
        )  # fmt: skip
        self.optimizer = object.__new__(FP32Optimizer)
        self.optimizer.optimizer, self.optimizer.config = self.adam, OptimizerConfig(lr=1e-2)
        self.optimizer.is_stub_optimizer = False
        self.optimizer.init_state_fn = init_state
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, init_lr=0.0, max_lr=1e-2, min_lr=1e-3, lr_warmup_steps=4,
            lr_decay_steps=40, lr_decay_style="cosine", start_wd=0.1, end_wd=0.1,
            wd_incr_steps=40, wd_incr_style="constant",
        )  # fmt: skip

    def sharded(self, kind: str, loading: bool = False) -> dict[str, Any]:
        model = sharded(self.model, kind)
        return {
            "model": model,
            "iteration": STEPS,
            "optimizer": self.optimizer.sharded_state_dict(model, is_loading=loading),
            "opt_param_scheduler": self.scheduler.state_dict(),
        }

    def load(self, kind: str, checkpoint: str) -> None:
        from megatron.core import dist_checkpointing

        state = dist_checkpointing.load(self.sharded(kind, loading=True), checkpoint)
        assert state["iteration"] == STEPS
        self.model.load_state_dict(state["model"])
        optimizer = state["optimizer"]
        step = float(optimizer["state"].pop("common_step"))
        for of in optimizer["state"].values():
            of["step"] = torch.tensor(step)
        self.adam.load_state_dict(optimizer)
        self.scheduler.load_state_dict(state["opt_param_scheduler"])

    def steps(self) -> list[float]:
        """The losses of some steps, before each of them."""
        tokens_BS, losses = batch(), []
        for _ in range(STEPS):
            self.adam.zero_grad()
            logits_TV = logits(self.model, tokens_BS[:, :-1]).flatten(0, 1)
            loss = F.cross_entropy(logits_TV, tokens_BS[:, 1:].flatten())
            loss.backward()
            self.adam.step()
            self.scheduler.step(len(tokens_BS))
            losses.append(loss.item())
        return losses


def init_state(adam: torch.optim.Optimizer, config: Any = None) -> None:
    for group in adam.param_groups:
        for parameter in group["params"]:
            if not adam.state[parameter]:
                adam.state[parameter] = {
                    name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")
                }


def train_and_save(model: nn.Module, kind: str, folder: Path, resume: str | None) -> None:
    from megatron.core import dist_checkpointing

    run = Trained(model)
    if resume is not None:
        run.load(kind, resume)
        torch.save({"continued": run.steps()}, folder / "resumed.pt")
        return
    run.steps()
    (folder / "checkpoint").mkdir(exist_ok=True)
    dist_checkpointing.save(run.sharded(kind), str(folder / "checkpoint"))
    torch.save({"continued": run.steps()}, folder / "expected.pt")


def main(kind: str, folder: Path, *changes: str) -> None:
    from megatron.core import dist_checkpointing

    from bench.peers import cuda_stand_ins

    torch.set_num_threads(1)
    pairs = [change.partition("=") for change in changes]
    values = {name: json.loads(value) for name, _, value in pairs}
    source, only_save = values.pop("from", None), values.pop("only_save", False)
    trained, resume = values.pop("trained", False), values.pop("resume", None)
    with cuda_stand_ins(), more_stand_ins():
        model = build(kind, values)
        if trained or resume:
            train_and_save(model, kind, folder, resume)
            dist.destroy_process_group()
            return
        if source is not None:
            state = {"model": sharded(model, kind)}
            model.load_state_dict(dist_checkpointing.load(state, source)["model"])
        saved(model, kind, folder)
        if source is None and not only_save:
            torch.save(computed(model), folder / "expected.pt")
    dist.destroy_process_group()


def batch() -> torch.Tensor:
    """Tokens, [2, 24]."""
    return torch.randint(VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))


def logits(model: nn.Module, tokens_BS: torch.Tensor) -> torch.Tensor:
    S = tokens_BS.shape[1]
    positions_BS = torch.arange(24).expand(2, 24)
    later_SS = torch.ones(24, 24, dtype=torch.bool).triu(1)[None, None]
    found: torch.Tensor = model(tokens_BS, positions_BS[:, :S], later_SS[..., :S, :S])
    return found.float()


def computed(model: nn.Module) -> dict[str, Any]:
    """What the model makes of a batch, and of some steps on it."""
    tokens_BS = batch()
    with torch.no_grad():
        logits_BSV = logits(model, tokens_BS)
    losses, optimizer = [], torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits_TV = logits(model, tokens_BS[:, :-1]).flatten(0, 1)
        loss = F.cross_entropy(logits_TV, tokens_BS[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"tokens": tokens_BS, "logits": logits_BSV, "losses": losses}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
