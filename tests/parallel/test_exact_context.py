"""Ranks that share sequences and have the numbers of one rank, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel import ParallelDims, Topology, local_sequence
from parallel.apply import AttentionCall, ExactSequence, FullSequence, apply_exact_context
from pretrain.model.norm import RMSNorm
from router import FixedCapacityConfig, RouterConfig, RouterOutput, TopKRouter
from tests.support.ranks import run_ranks

B, D, V = 2, 48, 70


class Layers(nn.Module):
    """One module of each kind, outputs of sizes that ranks do not divide, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.norm, self.plain_norm = RMSNorm(D, 1e-6), nn.RMSNorm(D)
        self.up, self.few = nn.Linear(D, 37), nn.Linear(37, 5, bias=False)
        self.down = nn.Linear(5, D, bias=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSD = self.norm(self.embed(tokens_BS))
        x_BSD = x_BSD + self.down(torch.tanh(self.few(self.up(x_BSD))))
        project: Any = getattr(self.embed, "project", F.linear)
        out: Tensor = project(self.plain_norm(x_BSD), self.embed.weight)
        return out


def passed(batch: int, length: int, ranks: int) -> dict[str, Tensor]:
    """Output and gradients; on several ranks of this rank's tokens."""
    torch.manual_seed(3)
    model = Layers()
    tokens, grad = torch.randint(V, (batch, length)), torch.randn(batch, length, V)
    mesh = ParallelDims.build(Topology(cp=ranks), "cpu").token_mesh
    apply_exact_context(model, mesh)
    tokens, grad = local_sequence(tokens, mesh), local_sequence(grad, mesh)
    out = model(tokens)
    out.backward(grad)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"tokens": tokens, "out": out.detach(), **gradients}


def on_rank(rank: int, ranks: int) -> list[dict[str, Tensor]]:
    return [passed(batch, 64 * ranks * times, ranks) for batch, times in ((B, 1), (1, 2), (0, 1))]


def alone(rank: int, ranks: int) -> list[dict[str, Tensor]]:
    return [passed(batch, 64 * ranks * times, 1) for batch, times in ((B, 1), (1, 2), (0, 1))]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_gradients_have_the_bits_of_one_rank(ranks: int) -> None:
    (expected,) = run_ranks(alone, 1, ranks)
    by_rank = run_ranks(on_rank, ranks, ranks)
    for case, one_rank in enumerate(expected):
        parts = [cases[case] for cases in by_rank]
        assert parts[0].keys() == one_rank.keys()
        for name in one_rank.keys() - {"tokens", "out"}:
            gradients = torch.stack([part[name] for part in parts])
            # Each number is one rank's: a sum of the others' zeros changes no bit.
            assert int((gradients != 0).sum(0).max()) <= 1, name
            assert torch.equal(gradients.sum(0), one_rank[name]), name
        outputs = torch.cat([part["out"].flatten(0, 1) for part in parts])
        assert torch.equal(outputs.flatten().sort()[0], one_rank["out"].flatten().sort()[0])


def attended(rank: int, ranks: int, length: int) -> tuple[Tensor, ...]:
    """Attention and its gradients, of this rank's tokens in the order of :func:`local_sequence`."""
    torch.manual_seed(5)
    q, k, v, dy = (torch.randn(B, length, heads, 8) for heads in (8, 4, 4, 8))
    mesh = ParallelDims.build(Topology(cp=ranks), "cpu").token_mesh
    context = ExactSequence(mesh.get_group()) if ranks > 1 else FullSequence()
    q, k, v, dy = (local_sequence(x, mesh) for x in (q, k, v, dy))
    inputs = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    y = context.attend(AttentionCall(*inputs, None, None))
    y.backward(dy.transpose(1, 2))
    return y.detach(), *(x.grad for x in inputs if x.grad is not None)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_attention_has_the_bits_of_one_rank(ranks: int) -> None:
    length = 64 * ranks
    (expected,) = run_ranks(attended, 1, 1, length)
    by_rank = run_ranks(attended, ranks, ranks, length)
    for rank in range(ranks):
        piece = length // (2 * ranks)
        numbers = (rank, 2 * ranks - 1 - rank)
        own_S = torch.cat([torch.arange(n * piece, (n + 1) * piece) for n in numbers])
        for shared_BHSC, alone_BHWC in zip(by_rank[rank], expected, strict=True):
            assert torch.equal(shared_BHSC, alone_BHWC[:, :, own_S])


COUNTS = ("tokens_per_expert_E", "rows_per_expert_E", "num_rerouted", "num_nonfinite_tokens")
LOSSES = ("load_balance_loss", "sequence_balance_loss", "z_loss", "aux_loss", "entropy")


def routed_on_rank(
    rank: int, ranks: int, length: int, padded: bool, coefficient: float
) -> RouterOutput:
    """A router's output for this rank's tokens, of a micro-batch that ends in padding or not.
    Without a sequence-wise loss padding is taken out."""
    torch.manual_seed(7)
    config = RouterConfig(
        num_experts=6, top_k=2, aux_loss_coeff=0.1, seq_aux_loss_coeff=coefficient,
        z_loss_coeff=0.1, capacity=FixedCapacityConfig(capacity_factor=1.0),
    )  # fmt: skip
    router, x_BWD = TopKRouter(D, config), torch.randn(B, length, D)
    mask_BW = torch.ones(B, length, dtype=torch.bool)
    mask_BW[0, length // 3 :] = not padded
    mesh = ParallelDims.build(Topology(cp=ranks), "cpu").token_mesh
    apply_exact_context(router, mesh)
    x_BSD, mask_BS = local_sequence(x_BWD, mesh), local_sequence(mask_BW, mesh)
    mask_T = mask_BS.flatten() if padded else None
    with torch.no_grad():
        out: RouterOutput = router(x_BSD.flatten(0, 1), length // ranks, None, None, mask_T)
        return out


@pytest.mark.parametrize(("padded", "coefficient"), [(False, 0.1), (True, 0.1), (True, 0.0)])
def test_a_shared_micro_batch_is_routed_as_on_one_rank(padded: bool, coefficient: float) -> None:
    length = 128
    (alone,) = run_ranks(routed_on_rank, 1, 1, length, padded, coefficient)
    by_rank = run_ranks(routed_on_rank, 2, 2, length, padded, coefficient)
    assert int(alone.num_rerouted) > 0
    for name in COUNTS:  # of their own tokens: ranks add them up
        assert torch.equal(sum(getattr(out, name) for out in by_rank), getattr(alone, name)), name
    for out in by_rank:  # of the whole micro-batch
        assert all(torch.equal(getattr(out, name), getattr(alone, name)) for name in LOSSES)
    # An expert's rows come into the order of these places, padding left out.
    places = []
    for out in by_rank:
        assert out.places is not None
        tokens_T = (out.expert_indices_TK < 6).any(1)
        places += out.places.positions_T[tokens_T | (out.topk_indices_TK < 0).any(1)].tolist()
    assert len(set(places)) == len(places)
    if not coefficient:
        assert sorted(places) == list(range(len(places)))
    experts_BWK = alone.expert_indices_TK.view(B, length, -1)
    for rank, out in enumerate(by_rank):
        first, second = experts_BWK.chunk(4, 1)[rank], experts_BWK.chunk(4, 1)[3 - rank]
        assert torch.equal(out.expert_indices_TK, torch.cat((first, second), 1).flatten(0, 1))


def refused_on_rank(rank: int) -> str:
    mesh = ParallelDims.build(Topology(cp=2), "cpu").token_mesh
    with pytest.raises(TypeError) as error:
        apply_exact_context(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), mesh)
    return str(error.value)


def test_a_module_without_exact_gradients_is_refused() -> None:
    for said in run_ranks(refused_on_rank, 2):
        assert said == "1 (LayerNorm) has no exact gradient of ['weight', 'bias']"
