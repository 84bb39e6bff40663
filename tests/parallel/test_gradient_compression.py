"""Sums of gradients over copies: once a step, alike on all, and what is rounded away is owed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallel import (
    CollectiveKind,
    CompressedSum,
    ParallelDims,
    Topology,
    apply_fsdp,
    free_gathered,
    local_shard,
    monitor_collectives,
    set_gradient_sync,
)
from parallel.apply import gradient_sums
from parallel.comm import gradient_compression
from tests.support.ranks import run_ranks


def gradients(rank: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        "weight": torch.randn(37, 70, generator=generator),
        "bias": torch.randn(37, generator=generator) * 1e-3,
    }


def compressed(rank: int, how: str, steps: int, bucket: int) -> dict:
    gradient_compression._BUCKET = bucket
    model = nn.Linear(70, 37)
    sums = CompressedSum(model, dist.group.WORLD, how)
    found = []
    with monitor_collectives() as monitor:
        for step in range(steps):
            for name, grad in gradients(rank, step).items():
                model.get_parameter(name).grad = grad
            sums.reduce()
            found.append({n: p.grad.clone() for n, p in model.named_parameters()})
            sums.commit()
        traffic = monitor.take()
    return {
        "sums": found, "owed": sums.residuals,
        "bytes": {kind.op: t.bytes for kind, t in traffic.items()},
    }  # fmt: skip


def exact(step: int, world: int, name: str) -> torch.Tensor:
    return sum(gradients(rank, step)[name].double() for rank in range(world))


@pytest.mark.parametrize("bucket", [1 << 20, 1024])
def test_bfloat16_halves_the_bytes_and_rounds_twice(bucket):
    world = 3
    results = run_ranks(compressed, world, "bfloat16", 1, bucket)
    for name in ("weight", "bias"):
        found = results[0]["sums"][0][name]
        for result in results[1:]:
            assert torch.equal(result["sums"][0][name], found)
        parts = [gradients(rank, 0)[name].bfloat16().float() for rank in range(world)]
        assert torch.equal(found, sum(parts[1:], parts[0]).bfloat16().float())
        assert (found - exact(0, world, name)).abs().max() <= 0.03 * found.abs().max()
    # Two bytes for each of four blocks of 1,024, and what makes a multiple of the ranks of them.
    if bucket > 37 * 71:
        assert results[0]["bytes"]["all_to_all"] == 2 * (4 * 1024 + 2)


def signs_oracle(values: list[float]) -> list[float]:
    sent = []
    for start in range(0, len(values), 1024):
        block = values[start : start + 1024]
        scale = sum(abs(v) for v in block) / len(block)
        sent += [scale if v >= 0 else -scale for v in block]
    return sent


def test_signs_and_magnitudes_are_those_of_a_plain_loop():
    world = 2
    results = run_ranks(compressed, world, "one_bit", 1, 1 << 20)
    for name in ("weight", "bias"):
        sent = [signs_oracle(gradients(r, 0)[name].flatten().tolist()) for r in range(world)]
        expected = torch.tensor(sent).sum(0)
        actual = results[0]["sums"][0][name].flatten()
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)
    # A bit for each number, and 4 bytes for each 1,024 of them: three blocks and one.
    assert results[0]["bytes"] == {"all_gather": 4 * 1024 // 8 + 4 * 4}


@pytest.mark.parametrize("bucket", [1 << 20, 1024])
def test_what_one_bit_gets_wrong_is_owed_and_paid(bucket):
    world, steps = 3, 5
    results = run_ranks(compressed, world, "one_bit", steps, bucket)
    for name in ("weight", "bias"):
        for step in range(steps):
            assert torch.equal(results[0]["sums"][step][name], results[2]["sums"][step][name])
        given = sum(exact(step, world, name) for step in range(steps))
        sent = sum(results[0]["sums"][step][name].double() for step in range(steps))
        owed = sum(result["owed"][name].double() for result in results)
        torch.testing.assert_close(sent + owed, given, rtol=1e-4, atol=1e-4)
        assert owed.norm() > 0.1 * given.norm()


def uncommitted(rank: int) -> tuple[bool, bool, bool]:
    model = nn.Linear(70, 37)
    sums = CompressedSum(model, dist.group.WORLD, "one_bit")
    for name, grad in gradients(rank, 0).items():
        model.get_parameter(name).grad = grad
    if rank == 1:
        model.weight.grad[3, 3] = torch.nan
    sums.reduce()
    bad = bool(model.weight.grad.isfinite().all())
    model.weight.grad, model.bias.grad = None, gradients(rank, 1)["bias"]
    sums.reduce()
    untouched = not any(residual.any() for residual in sums.residuals.values())
    sums.commit()
    only_bias = not sums.residuals["weight"].any() and bool(sums.residuals["bias"].any())
    return bad, untouched, only_bias


def test_what_was_not_committed_is_not_owed():
    for finite, untouched, only_bias in run_ranks(uncommitted, 2):
        assert not finite
        assert untouched
        assert only_bias


def accumulated(rank: int, reshard: bool, sync: bool) -> tuple[dict, dict]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    dims = ParallelDims.build(Topology(dp_replicate=2, dp_shard=2), "cpu")
    apply_fsdp(model, dims, blocks=list(model), reshard_after_forward=reshard)
    with monitor_collectives() as monitor:
        for turn in range(3):
            set_gradient_sync(model, sync=sync, last=turn == 2)
            model(inputs(rank, turn)).square().sum().backward()
        traffic = monitor.take()
    whole = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    assert all(local_shard(p).numel() < p.numel() for p in model.parameters())
    return whole, {kind: t.count for kind, t in traffic.items()}


def inputs(rank: int, turn: int) -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * rank + turn))


@pytest.mark.parametrize(("reshard", "sync"), [(True, True), (False, True), (False, False)])
def test_copies_are_summed_once_a_step(reshard, sync):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    for rank in range(4):
        for turn in range(3):
            model(inputs(rank, turn)).square().sum().backward()
    for whole, counts in run_ranks(accumulated, 4, reshard, sync):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(whole[name], parameter.grad, rtol=1e-5, atol=1e-5)
        assert counts[CollectiveKind("all_reduce", "dp")] == 2
        assert counts[CollectiveKind("reduce_scatter", "dp")] == (6 if sync else 2)
        # Of two layers: each forward and each backward, or once.
        assert counts[CollectiveKind("all_gather", "dp")] == (12 if reshard else 2)


def sometimes_used(rank: int, reshard: bool) -> list[dict[str, torch.Tensor]]:
    """Two steps of two micro-batches; one layer is used in each step's first alone."""
    torch.manual_seed(0)
    model = TwoLayers()
    dims = ParallelDims.build(Topology(dp_replicate=2, dp_shard=2), "cpu")
    apply_fsdp(model, dims, blocks=[model.always, model.first], reshard_after_forward=reshard)
    found = []
    for step in range(2):
        model.zero_grad()
        for turn in range(2):
            set_gradient_sync(model, sync=True, last=turn == 1)
            model(inputs(rank, 2 * step + turn), turn == 0).square().sum().backward()
        assert all(local_shard(p).numel() < p.numel() for p in model.parameters())
        found.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
    return found


def given_up(rank: int) -> list[float]:
    """Losses before and after other values, in the middle of a step that is given up."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    dims = ParallelDims.build(Topology(dp_shard=2), "cpu")
    apply_fsdp(model, dims, blocks=list(model), reshard_after_forward=False)
    losses = []
    for value in (0.5, 0.25):
        with torch.no_grad():
            for parameter in model.parameters():
                local_shard(parameter).fill_(value)
        set_gradient_sync(model, sync=True, last=False)
        loss = model(torch.ones(3, 6)).mean()
        loss.backward()
        losses.append(loss.item())
        free_gathered(model)
    return losses


def test_a_step_that_is_given_up_keeps_no_gathered_parameters():
    for losses in run_ranks(given_up, 2):
        assert losses == pytest.approx([(6 * 0.5 + 0.5) * 0.5 * 5 + 0.5, 1.75 * 0.25 * 5 + 0.25])


def test_a_torch_that_leaves_gradients_out_of_the_sum_is_refused():
    # torch 2.11 has no such method, and gives wrong gradients.
    with pytest.raises(RuntimeError, match=r"replicas .* must have torch 2.12 or later, not 2"):
        gradient_sums._sum_also_unused(object())


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.first = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.always(x)
        return self.first(x) if both else x


@pytest.mark.parametrize("reshard", [True, False])
def test_what_the_last_micro_batch_does_not_use_is_summed_all_the_same(reshard):
    torch.manual_seed(0)
    model = TwoLayers()
    results = run_ranks(sometimes_used, 4, reshard)
    for step in range(2):
        model.zero_grad()
        for rank in range(4):
            for turn in range(2):
                model(inputs(rank, 2 * step + turn), turn == 0).square().sum().backward()
        for found in results:
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(found[step][name], parameter.grad, rtol=1e-5, atol=1e-5)
