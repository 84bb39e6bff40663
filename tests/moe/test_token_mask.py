"""A mask of tokens: padding takes no part in routing, capacity, dispatch, losses and statistics.

The reference is the same layer over the tokens without padding.

Legend: T tokens, D d_model, E experts, K top_k.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe import MoEConfig, MoELayer, MoEOutput
from parallel import ParallelDims, Topology, apply_expert_parallel
from tests.support.ranks import run_ranks

E, K, D, B, S = 8, 2, 12, 3, 10
LOSSES = {"aux_loss_coeff": 0.1, "z_loss_coeff": 0.01}

CASES: dict[str, dict[str, Any]] = {
    "dropless": {},
    "shared": {"num_shared_experts": 1, "ffn_bias": True},
    "sigmoid": {"score_func": "sigmoid", "expert_bias": True, "route_scale": 1.5},
    "softmax_after_topk": {"softmax_after_topk": True},
    "groups": {"n_groups": 4, "topk_groups": 2},
    "sequence": {"seq_aux_loss_coeff": 0.1},
    "expert_choice": {"routing": "expert_choice"},
    "sinkhorn": {"routing": "sinkhorn"},
    "in_turn": {"routing": "force_load_balance"},
    "position": {"capacity": {"policy": "fixed", "capacity_factor": 1, "drop_policy": "position"}},
    "probs": {"capacity": {"policy": "fixed", "capacity_factor": 1, "drop_policy": "probs"}},
    "reroute": {"capacity": {"policy": "fixed", "capacity_factor": 1, "drop_policy": "reroute"}},
    "straggler": {"capacity": {"policy": "straggler_aware"}},
    "bounded": {"capacity": {"policy": "dropless", "max_tokens_per_rank": 20}},
    "float8_rows": {"dispatch_dtype": "float8"},
    "on_input": {"weights_on_input": True, "router_bias": True, "score_func": "sqrtsoftplus"},
    "loop": {"backend": "loop"},
    "grouped": {"backend": "grouped_mm"},
}


def make_layer(**fields: Any) -> MoELayer:
    torch.manual_seed(0)
    sizes = {"d_model": 16 if fields.get("backend") == "grouped_mm" else D, "d_ff": 16}
    return MoELayer(MoEConfig(**sizes, num_experts=E, top_k=K, **LOSSES | fields))


def make_input(d_model: int, padding: list[int]) -> tuple[Tensor, Tensor]:
    """[B, S, D] with NaN for padding, on the left of a sequence, and the mask [B, S]."""
    torch.manual_seed(1)
    x = torch.randn(B, S, d_model)
    mask = torch.arange(S) >= torch.tensor(padding).unsqueeze(1)
    return x.masked_fill(~mask.unsqueeze(-1), torch.nan), mask


def carry_the_mask(patch: pytest.MonkeyPatch) -> None:
    """As on an accelerator, where the host does not know the number of tokens."""
    for module in ("moe.layer", "router.topk"):
        patch.setattr(f"{module}.token_rows_of", lambda _: None)


def loss_of(out: MoEOutput, weight: Tensor) -> Tensor:
    return (out.hidden * weight).sum() + out.aux.aux_loss


def gradients(layer: MoELayer) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in layer.named_parameters()}


def assert_same_aux(
    got: MoEOutput, wanted: MoEOutput, mask: Tensor, same: Callable[..., bool]
) -> None:
    for name in ("load_balance_loss", "z_loss", "entropy"):
        assert same(getattr(got.aux, name), getattr(wanted.aux, name)), name
    for name in ("tokens_per_expert_E", "num_dropped", "num_rerouted", "expert_counts_E"):
        assert torch.equal(getattr(got.aux, name), getattr(wanted.aux, name)), name
    assert got.aux.num_nonfinite_tokens == 0
    rows = mask.flatten()
    assert torch.equal(got.aux.topk_indices_TK[rows], wanted.aux.topk_indices_TK)
    assert (got.aux.topk_indices_TK[~rows] == E).all()


@pytest.mark.filterwarnings("ignore:routing is force_load_balance")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("padding", [[3, 0, 6], [10, 10, 9], [10, 10, 10], [0, 0, 0]])
@pytest.mark.parametrize("where", ["host", "accelerator"])
def test_padding_changes_nothing_of_the_tokens(case, padding, where, monkeypatch):
    """On the host to the bit; on an accelerator sums over tokens are of other lengths."""
    same = torch.equal
    if where == "accelerator":
        carry_the_mask(monkeypatch)
        same = torch.allclose
    layer, reference = make_layer(**CASES[case]), make_layer(**CASES[case])
    x, mask = make_input(layer.config.d_model, padding)
    tokens = x[mask].requires_grad_()
    x.requires_grad_()
    weight = torch.randn_like(x).nan_to_num()

    got = layer(x, token_mask=mask)
    wanted = reference(tokens)
    assert (got.hidden[~mask] == 0).all()
    if case != "sequence":  # without padding the sequences' lengths differ: see below
        assert same(got.hidden[mask], wanted.hidden)
        assert_same_aux(got, wanted, mask, same)
        loss_of(got, weight).backward()
        loss_of(wanted, weight[mask]).backward()
        assert x.grad is not None
        assert tokens.grad is not None
        assert (x.grad[~mask] == 0).all()
        assert same(x.grad[mask], tokens.grad)
        expected = gradients(reference)
        for name, grad in gradients(layer).items():
            assert grad is not None
            assert torch.allclose(grad, expected[name], atol=1e-6), name
            assert same is torch.allclose or torch.equal(grad, expected[name]), name

    # The record of the routing replays with the mask, as it does without.
    again = layer(x, got.aux.topk_indices_TK, token_mask=mask)
    torch.testing.assert_close(again.hidden, got.hidden)


@pytest.mark.parametrize("case", ["dropless", "probs", "expert_choice"])
def test_the_router_says_of_padding_what_it_says_where_the_mask_is_carried(case, monkeypatch):
    router = make_layer(**CASES[case]).router
    x, mask = make_input(D, [3, 0, 6])
    tokens = x.flatten(0, 1), None, None, None, mask.flatten()
    host = router(*tokens)
    carry_the_mask(monkeypatch)
    carried = router(*tokens)
    padding = ~mask.flatten()
    for name in ("expert_indices_TK", "topk_indices_TK", "dropped_TK", "nonfinite_T"):
        assert torch.equal(getattr(host, name), getattr(carried, name)), name
    assert host.dropped_TK[padding].all()
    assert torch.allclose(host.expert_weights_TK, carried.expert_weights_TK)


def test_the_loss_of_a_sequence_counts_its_tokens():
    layer = make_layer(seq_aux_loss_coeff=0.1)
    x, mask = make_input(D, [3, 0, 10])
    got = layer(x, token_mask=mask).aux.sequence_balance_loss
    lone = [layer(row[keep]).aux.sequence_balance_loss for row, keep in zip(x, mask, strict=True)]
    torch.testing.assert_close(got, (lone[0] + lone[1]) / 2)


def test_a_mask_must_fit_the_input():
    layer = make_layer()
    x = torch.randn(B, S, D)
    with pytest.raises(ValueError, match=r"token_mask \(\[3\], torch.bool\) must be bool, of "):
        layer(x, token_mask=torch.ones(B, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"token_mask .* must be bool"):
        layer(x, token_mask=torch.ones(B, S))


DISPATCHERS: dict[str, dict[str, Any]] = {
    "all_to_all": {},
    "chunks": {"overlap_chunks": 3},
    "padded": {"dispatcher": "padded_all_to_all", "max_tokens_per_call": B * S},
    "padded_fixed": {
        "dispatcher": "padded_all_to_all",
        "max_tokens_per_call": B * S,
        "capacity": {"policy": "fixed", "capacity_factor": 1},
    },
    "all_gather": {"dispatcher": "all_gather"},
    "sequence": {"seq_aux_loss_coeff": 0.1},
}


def masked_on_rank(rank: int) -> list[str]:
    """The cases in which a masked call differs from a call of the tokens, under ep = 2."""
    wrong = _wrong_on_rank(rank)
    with pytest.MonkeyPatch.context() as patch:
        carry_the_mask(patch)
        return wrong + _wrong_on_rank(rank)


def _wrong_on_rank(rank: int) -> list[str]:
    wrong = []
    dims = ParallelDims.build(Topology(dp_shard=2, ep=2), "cpu")
    for case, fields in DISPATCHERS.items():
        for padding in ([3, 0, 6], [10, 10, 10]):
            layers = [make_layer(**fields) for _ in range(2)]
            for layer in layers:
                apply_expert_parallel(layer, dims.ep_mesh)
            # Rank 1 has no padding in any case.
            x, mask = make_input(D, padding if rank == 0 else [0, 0, 0])
            got = layers[0](x, token_mask=mask if rank == 0 else None)
            wanted = layers[1](x[mask].unsqueeze(0) if rank == 0 else x)
            weight = torch.randn(B, S, D)
            ((got.hidden * weight).sum() + got.aux.load_balance_loss).backward()
            same_weight = weight[mask].unsqueeze(0) if rank == 0 else weight
            ((wanted.hidden * same_weight).sum() + wanted.aux.load_balance_loss).backward()
            pairs = [(got.hidden[mask], wanted.hidden.reshape(-1, D))]
            pairs += [(got.aux.load_balance_loss, wanted.aux.load_balance_loss)]
            pairs += [
                (a.grad, b.grad)
                for a, b in zip(layers[0].parameters(), layers[1].parameters(), strict=True)
            ]
            for a, b in pairs:
                a, b = (getattr(t, "to_local", lambda t=t: t)() for t in (a, b))
                if not torch.allclose(a, b, rtol=1e-5, atol=1e-6):
                    wrong.append(f"{case} {padding} {a.shape}")
            computed = int(got.aux.stopwatch.rows)
            total = torch.tensor([computed, int(mask.sum()) * K - int(got.aux.num_dropped)])
            dist.all_reduce(total)
            if total[0] != total[1]:
                wrong.append(f"{case} {padding}: {total.tolist()} rows computed and expected")
    return wrong


def test_no_row_of_padding_travels_to_another_rank():
    assert run_ranks(masked_on_rank, 2) == [[], []]
