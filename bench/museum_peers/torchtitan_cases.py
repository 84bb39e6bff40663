"""Cases of torchtitan: counts of FLOPs."""

from __future__ import annotations

from bench.museum_peers.frame import Answer, peer_case

_NEEDS = (
    "tyro==1.0.17",
    "docstring_parser==0.18.0",
    "triton==3.9.0",
    "torchdata==0.11.0",
    "tensorboard==2.20.0",
    "absl-py==2.5.1",
    "protobuf==5.29.5",
    "spmd_types==0.2.3",
    "datasets==5.2.0",
    "dill==0.4.1",
    "multiprocess==0.70.19",
    "xxhash==4.1.0",
    "pandas==3.1.1",
)


@peer_case(
    "pytorch/torchtitan#1920",
    went_wrong="The FLOPs of attention took a head to be d_model / heads wide, which is half of "
    "Qwen3's heads.",
    wrong=("torchtitan==0.2.0", *_NEEDS),
    fixed=("torchtitan==0.2.2", *_NEEDS),
)
def flops_of_attention_are_those_of_the_heads_that_the_model_has() -> Answer:
    """FLOPs that grow with the sequence: 12 x layers x heads x width of a head for each token."""
    import torch
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
    from torchtitan.models.qwen3.model.model import Qwen3Model

    args = Qwen3ModelArgs(
        vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, hidden_dim=48,
        max_seq_len=64, moe_enabled=True, moe_inter_dim=16,
        moe_args=MoEArgs(num_experts=4, top_k=2),
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3Model(args)
    of = [args.get_nparams_and_flops(model, length)[1] for length in (0, 1)]
    seen, right = of[1] - of[0], 12 * 2 * 4 * 16
    return Answer(seen == right, f"{seen:g} FLOPs for each earlier token, of {right}")
