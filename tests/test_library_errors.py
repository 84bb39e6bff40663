"""What a program hears that calls the library wrongly: one line, in the names of the call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ckpt
from moe import DroplessConfig, FixedCapacityConfig, MoEConfig, MoELayer, StragglerAwareConfig
from parallel import (
    CompressedSum,
    ParallelConfig,
    ParallelDims,
    Topology,
    apply_expert_parallel,
    apply_fsdp,
    apply_recompute,
)
from router import RouterConfig

SPEC = ckpt.ArraySpec("w", (4, 2), torch.float32, ((), ()))
BOX = ((0, 4), (0, 2))


def moe(**fields):
    return MoEConfig(**{"d_model": 8, "d_ff": 8, "num_experts": 4, "top_k": 2, **fields})


def info(**fields):
    known = {"save_id": "a", "step": 1, "topology": Topology(), "state": {}, "spec": {}}
    return ckpt.SaveInfo(**{**known, "spec_hash": "", **fields})


def save(arrays):
    ckpt.save("nowhere", info(), arrays, rank=0, agree=lambda ok: ok)


CONFIGS = {
    "a rule": (lambda: moe(top_k=5), "MoEConfig: top_k (5) must be at most num_experts (4)"),
    "a type": (lambda: moe(top_k="2"), "MoEConfig: top_k ('2'): Input should be a valid integer"),
    "no such field": (
        lambda: moe(num_expert=8),
        "MoEConfig: there is no field num_expert; did you mean num_experts?",
    ),
    "fields left out": (
        lambda: MoEConfig(d_ff=8),
        "MoEConfig: there must be a value of num_experts, top_k, d_model",
    ),
    "a capacity": (
        lambda: moe(capacity={"policy": "fixed", "factor": 2.0}),
        "MoEConfig: there is no field capacity.factor",
    ),
    "another policy's field": (
        lambda: moe(capacity={"drop_policy": "probs"}),
        "MoEConfig: capacity.drop_policy (probs) must be left out with capacity.policy (dropless)",
    ),
    "a router": (lambda: RouterConfig(num_experts=4, top_k=9), "RouterConfig: top_k (9) must be"),
    "dropless": (
        lambda: DroplessConfig(max_tokens_per_rank=-1),
        "DroplessConfig: max_tokens_per_rank (-1): Input should be greater than or equal to 0",
    ),
    "fixed": (
        lambda: FixedCapacityConfig(capacity_factor=0),
        "FixedCapacityConfig: capacity_factor (0): Input should be greater than 0",
    ),
    "straggler-aware": (
        lambda: StragglerAwareConfig(capacity_factor=0.5),
        "StragglerAwareConfig: capacity_factor (0.5): Input should be greater than or equal to 1",
    ),
}
CALLS = {
    "degrees": (lambda: Topology(dp_shard=4, ep=3), "ep (3) must divide dp_shard x cp x tp (4 x"),
    "a degree": (lambda: Topology(dp_shard=2.0), "dp_shard (2.0) must be a whole number of at"),
    "a degree of 0": (lambda: Topology(ep=0), "ep (0) must be a whole number of at least 1"),
    "no process group": (
        lambda: ParallelDims.build(Topology(), "cpu"),
        "ParallelDims.build needs a process group: call torch.distributed.init_process_group()",
    ),
    "recomputation": (
        lambda: apply_recompute([], "all"),
        "how (all) must be one of none, selective, full",
    ),
    "compression": (
        lambda: CompressedSum(nn.Linear(2, 2), None, "two_bit"),
        "how (two_bit) must be bfloat16 or one_bit",
    ),
    "an input": (
        lambda: MoELayer(moe())(torch.ones(3, 5)),
        "the input's last dim (5) must be d_model (8)",
    ),
    "biases that there are not": (
        lambda: MoELayer(moe()).router.update_bias(torch.zeros(4)),
        "expert_bias (false) must be true for update_bias",
    ),
    "counts in a list": (
        lambda: MoELayer(moe(score_func="sigmoid", expert_bias=True)).router.update_bias([1] * 4),
        "tokens_per_expert_E (list) must be a tensor [4]",
    ),
    "counts of other experts": (
        lambda: MoELayer(moe())(torch.ones(3, 8), prior_expert_counts_E=torch.ones(5)),
        "prior_expert_counts_E ([5]) must be [4], a count for each of num_experts",
    ),
    "ranks of a load": (
        lambda: MoELayer(moe())(torch.ones(3, 8)).aux.rank_imbalance(3),
        "ranks (3) must divide num_experts (4)",
    ),
    "a sequence's length": (
        lambda: MoELayer(moe()).router(torch.ones(6, 8), seq_len=4),
        "seq_len (4) must divide the number of tokens (6)",
    ),
    "a tensor in the state": (
        lambda: info(state={"a": [1, {"b": torch.ones(1)}]}),
        "state['a'][1]['b'] (Tensor) must be plain JSON",
    ),
    "a number as a key": (lambda: info(state={1: 2}), "state (dict) must be plain JSON"),
    "a save id": (lambda: info(save_id="a/b"), "save_id ('a/b') must be a name without '/'"),
    "a step": (lambda: info(step=6.0), "step (6.0) must be a whole number of at least 0"),
    "a piece": (
        lambda: ckpt.LocalArray(SPEC, [((0, 3), (0, 2))], [torch.ones(4, 2)]),
        "array w: a tensor of shape (4, 2) and torch.float32 must have the shape of its box (3, 2)",
    ),
    "a dtype": (
        lambda: ckpt.LocalArray(SPEC, [BOX], [torch.ones(4, 2, dtype=torch.float64)]),
        "array w: a tensor of shape (4, 2) and torch.float64 must have",
    ),
    "pieces": (
        lambda: ckpt.LocalArray(SPEC, [BOX, BOX], [torch.ones(4, 2)]),
        "array w: pieces (1) must be as many as boxes (2)",
    ),
    "an axis": (
        lambda: ckpt.ArraySpec("w", (4,), torch.float32, (("dp",),)).record(Topology()),
        "splits (('dp',),) must name axes that go together: pp, dp_replicate, fsdp, tp; pp,",
    ),
    "retention": (lambda: ckpt.retain("nowhere", 0), "keep (0) must be at least 1"),
}
TYPES = {
    "positions": (lambda: MoEConfig(8, 8, 4, 2), "MoEConfig takes keyword arguments only"),
    "a dict": (lambda: MoELayer({"d_model": 8}), "config (dict) must be a MoEConfig"),
    "no mesh": (
        lambda: apply_expert_parallel(MoELayer(moe()), Topology()),
        "ep_mesh (Topology) must be a mesh",
    ),
    "no meshes": (
        lambda: apply_fsdp(nn.Linear(2, 2), Topology(), blocks=[]),
        "dims (Topology) must be a ParallelDims",
    ),
    "a state dict": (
        lambda: save(nn.Linear(2, 2).state_dict()),
        "arrays (str) must be LocalArrays; ckpt.save_state_dict saves a state dict",
    ),
}


@pytest.mark.parametrize(
    ("call", "line", "error"),
    [
        *((*case, ValueError) for case in (CONFIGS | CALLS).values()),
        *((*case, TypeError) for case in TYPES.values()),
    ],
    ids=[*CONFIGS, *CALLS, *TYPES],
)
def test_a_wrong_call_is_told_in_its_own_names(call, line, error):
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert line in text
    assert "\n" not in text
    assert "moe." not in text
    assert "parallel." not in text
    assert "pydantic" not in text


def test_a_section_of_a_spec_is_told_as_fields_of_the_spec():
    with pytest.raises(ValueError, match=r"parallel.ep \(3\) must divide"):
        ParallelConfig(ep=3).topology(4)
