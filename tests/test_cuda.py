"""What only a CUDA device can show; skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from moe import MoEConfig, MoELayer
from moe.experts import choose_backend, experts_grouped_mm, experts_loop
from tests.dist import run_ranks
from tests.jobs import events, write_corpus, write_spec
from tests.test_pretrain_runs import on_rank

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def layer_and_input(dtype=torch.float32) -> tuple[MoELayer, torch.Tensor]:
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(d_model=64, d_ff=96, num_experts=8, top_k=2, num_shared_experts=1))
    return layer.to(dtype), torch.randn(257, 64).to(dtype)


@pytest.mark.parametrize("tokens", [257, 1, 0])
def test_the_layer_on_the_device_is_the_layer_on_the_host(tokens):
    host, x = layer_and_input()
    device, _ = layer_and_input()
    device.cuda()
    a, b = host(x[:tokens]), device(x[:tokens].cuda())
    (a.hidden.square().sum() + a.aux.loss).backward()
    (b.hidden.square().sum() + b.aux.loss).backward()
    torch.testing.assert_close(b.hidden.cpu(), a.hidden, rtol=1e-4, atol=1e-4)
    assert torch.equal(b.aux.tokens_per_expert_E.cpu(), a.aux.tokens_per_expert_E)
    for p, q in zip(host.parameters(), device.parameters(), strict=True):
        torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-3, atol=1e-4)


def test_grouped_products_agree_with_the_plain_ones_in_bfloat16():
    assert choose_backend("auto", 64, 96, torch.bfloat16, "cuda") is experts_grouped_mm
    rows = torch.tensor([5, 0, 40, 1], device="cuda")
    x = torch.randn(46, 64, device="cuda", dtype=torch.bfloat16)
    w = torch.rand(46, device="cuda", dtype=torch.bfloat16)
    shapes = ((4, 64, 96), (4, 64, 96), (4, 96, 64))
    weights = [torch.randn(s, device="cuda", dtype=torch.bfloat16) / 8 for s in shapes]
    torch.testing.assert_close(
        experts_grouped_mm(x, w, rows, *weights),
        experts_loop(x, w, rows, *weights),
        rtol=5e-2,
        atol=5e-2,
    )


def test_backward_is_the_same_twice():
    grads = []
    for _ in range(2):
        layer, x = layer_and_input(torch.bfloat16)
        layer.cuda()(x.cuda()).hidden.float().square().sum().backward()
        grads.append([p.grad for p in layer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_run_on_one_device_resumes_bitwise(tmp_path):
    write_corpus(tmp_path / "text")
    spec = write_spec(tmp_path, sample={"prompt": "def", "tokens": 4})
    losses = []
    for name, stop_after in (("straight", None), ("resumed", 4), ("resumed", None)):
        arguments = [str(spec), "--set", f"run_dir={tmp_path / name}"]
        ((code, _, err),) = run_ranks(on_rank, 1, arguments, stop_after, group=False)
        assert code == (75 if stop_after else 0), err
    for name in ("straight", "resumed"):
        losses.append([e["loss"] for e in events(tmp_path / name, "step")])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6
