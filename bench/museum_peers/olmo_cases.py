"""Cases of OLMo-core: its optimizer, first weights, and counts of parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

from bench.museum_peers.frame import Answer, peer_case

_NEEDS = (
    "cached-path==1.8.1",
    "dataclass-extensions==0.2.4",
    "bettermap==1.3.1",
    "dill==0.4.1",
    "omegaconf==2.3.0",
    "antlr4-python3-runtime==4.9.3",
    "importlib-resources==6.5.2",
    # cached-path imports the clients of object stores.
    "google-api-core==2.24.2",
    "google-auth==2.40.3",
    "google-cloud-core==2.4.3",
    "google-cloud-storage==2.19.0",
    "google-resumable-media==2.7.2",
    "googleapis-common-protos==1.70.0",
    "protobuf==5.29.5",
    "proto-plus==1.26.1",
    "cachetools==5.5.2",
    "pyasn1==0.6.1",
    "pyasn1-modules==0.4.2",
    "rsa==4.9.1",
)


@peer_case(
    "allenai/OLMo-core#309",
    went_wrong="The optimizer that skips steps never counted its steps, so every step had the bias "
    "correction of the first.",
    wrong=("ai2-olmo-core==2.1.0", *_NEEDS),
    fixed=("ai2-olmo-core==2.4.0", *_NEEDS),
)
def an_optimizer_that_skips_spikes_takes_the_steps_of_adamw() -> Answer:
    import torch
    from olmo_core.optim import SkipStepAdamW

    ends = []
    for kind in (SkipStepAdamW, torch.optim.AdamW):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer: Any = kind([weight], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
        for step in range(8):
            weight.grad = torch.tensor([1.0, -2.0, 0.5]) / (1 + step)
            if kind is SkipStepAdamW:
                optimizer.latest_loss = torch.tensor(1.0)
                optimizer.latest_grad_norm = torch.tensor(1.0)
            optimizer.step()
        ends.append(weight.detach())
    gap = (ends[0] - ends[1]).abs().max().item()
    return Answer(gap < 1e-4, f"weights are {gap:.3g} from AdamW's after 8 steps without a skip")


def _decoder(**more: Any) -> Any:
    from olmo_core.nn.transformer import TransformerConfig

    return TransformerConfig.llama_like(
        d_model=64, vocab_size=128, n_layers=2, n_heads=4, hidden_size_multiplier=1.0, **more
    ).build(init_device="meta")


@peer_case(
    "allenai/OLMo-core#679",
    went_wrong="Two chunks of a pipeline on one rank began with the same random numbers, so their "
    "layers were copies of each other.",
    wrong=("ai2-olmo-core==2.4.0", *_NEEDS),
    fixed=("ai2-olmo-core==2.6.0", *_NEEDS),
)
def two_chunks_of_a_pipeline_on_a_rank_begin_with_other_weights() -> Answer:
    """The pipeline's mesh, which needs ranks, is stood in for by its rank and its size."""
    import inspect

    import torch

    parts = [_decoder(), _decoder()]
    mesh = SimpleNamespace(get_local_rank=lambda: 0, size=lambda: 2)
    with mock.patch("olmo_core.nn.transformer.model.get_pp_mesh", return_value=mesh):
        for number, model in enumerate(parts):
            model._pp_enabled = True
            takes = inspect.signature(model.init_weights).parameters
            which = {"model_part_idx": number} if "model_part_idx" in takes else {}
            model.init_weights(device=torch.device("cpu"), world_mesh=mesh, **which)
    first, second = (model.blocks["0"].attention.w_q.weight for model in parts)
    same = bool(torch.equal(first, second))
    return Answer(not same, "both chunks have equal weights" if same else "the weights differ")


@peer_case(
    "allenai/OLMo-core#477",
    went_wrong="The count of parameters took the norm of keys to be as wide as the model when keys "
    "have fewer heads.",
    wrong=("ai2-olmo-core==2.4.0", *_NEEDS),
    fixed=("ai2-olmo-core==2.6.0", *_NEEDS),
)
def the_count_of_parameters_is_that_of_the_model() -> Answer:
    from olmo_core.nn.attention import AttentionConfig
    from olmo_core.nn.layer_norm import LayerNormConfig

    config = AttentionConfig(
        n_heads=8, n_kv_heads=2, bias=False, qk_norm=LayerNormConfig(bias=False)
    )
    layer = config.build(64, layer_idx=0, n_layers=1, init_device="cpu")
    real = sum(parameter.numel() for parameter in layer.parameters())
    counted = config.num_params(64)
    return Answer(counted == real, f"counted {counted} parameters of {real}")
