"""What only a CUDA device can show; skipped where there is none."""

from __future__ import annotations

import warnings

import pytest
import torch

import ckpt
from moe import GroupedExperts, MoEConfig, MoELayer, choose_backend, float8_linear, why_no_float8
from moe.experts import megablocks_backend
from parallel import ParallelDims, Topology, apply_expert_parallel
from pretrain.model import Decoder, ModelConfig
from pretrain.optim import MuonConfig, Surroundings, build_optimizer
from tests.runs.test_runs import on_rank
from tests.support.checkpoints import info
from tests.support.jobs import events, write_corpus, write_spec
from tests.support.ranks import run_ranks

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
    (a.hidden.square().sum() + a.aux.aux_loss).backward()
    (b.hidden.square().sum() + b.aux.aux_loss).backward()
    torch.testing.assert_close(b.hidden.cpu(), a.hidden, rtol=1e-4, atol=1e-4)
    assert torch.equal(b.aux.tokens_per_expert_E.cpu(), a.aux.tokens_per_expert_E)
    for p, q in zip(host.parameters(), device.parameters(), strict=True):
        torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-3, atol=1e-4)


def experts_and_rows() -> tuple[GroupedExperts, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    experts = GroupedExperts(
        MoEConfig(num_experts=4, top_k=2, d_model=64, d_ff=96, ffn_bias=True)
    ).to("cuda", torch.bfloat16)
    counts = torch.tensor([5, 0, 40, 1], device="cuda")
    source = torch.randint(30, (50,), device="cuda")  # the last four are padding
    x = torch.randn(30, 64, device="cuda", dtype=torch.bfloat16)
    return experts, (x, source, torch.rand(50, device="cuda", dtype=torch.bfloat16), counts)


# MegaBlocks 0.10 calls functions of torch that warn.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("backend", ["grouped_mm", "megablocks"])
def test_fast_paths_agree_with_the_plain_one_in_bfloat16(backend):
    if backend == "megablocks" and megablocks_backend.why_no_megablocks(torch.bfloat16, "cuda"):
        pytest.skip("megablocks is not installed")
    fast = torch.cuda.get_device_capability()[0] in (9, 10)
    expected = "grouped_mm" if fast else "loop"
    assert choose_backend("auto", 64, 96, torch.bfloat16, "cuda") == expected
    experts, (x, source, weights, counts) = experts_and_rows()
    results = []
    for name in ("loop", backend):
        experts.backend = name
        experts.zero_grad()
        inputs = x.clone().requires_grad_(), weights.clone().requires_grad_()
        y = experts(inputs[0], source, inputs[1], counts)
        y.float().square().sum().backward()
        results.append([y, *(t.grad for t in inputs), *(p.grad for p in experts.parameters())])
    for a, b in zip(*results, strict=True):
        assert (a - b).float().norm() < 3e-2 * b.float().norm()


@pytest.mark.parametrize(
    "capacity", [{"policy": "dropless"}, {"policy": "fixed", "drop_policy": "position"}]
)
def test_the_layer_does_not_wait_for_the_device(capacity):
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(d_model=64, d_ff=96, num_experts=8, top_k=2, capacity=capacity)).to(
        "cuda", torch.bfloat16
    )
    x = torch.randn(256, 64, device="cuda", dtype=torch.bfloat16)
    layer(x).hidden.float().sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode warns once that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).hidden.float().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_two_devices(rank: int) -> None:
    torch.cuda.set_device(rank)
    for dispatcher, copies in (("all_to_all", 0), ("all_gather", 0), ("all_to_all", 2)):
        one_on_devices(dispatcher, copies)


def one_on_devices(dispatcher: str, copies: int) -> None:
    dims = ParallelDims.build(Topology(dp_shard=2, ep=2), "cuda")
    torch.manual_seed(0)
    config = MoEConfig(
        d_model=64, d_ff=96, num_experts=8, top_k=2, dispatcher=dispatcher, copies=copies
    )
    plain, layer = MoELayer(config).cuda(), MoELayer(config).cuda()
    layer.load_state_dict(plain.state_dict())
    apply_expert_parallel(layer, dims.ep_mesh)
    x = torch.randn(50, 64, device="cuda")
    routes = torch.tensor([[0, 1]], device="cuda").expand(50, 2).clone()  # of the first device
    for replay in (None, routes):
        out, expected = layer(x, replay), plain(x, replay)
        torch.testing.assert_close(out.hidden, expected.hidden, rtol=1e-4, atol=1e-4)
        out.hidden.square().sum().backward()
    assert copies == 0 or int(out.aux.num_copied) > 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_dispatch_between_two_devices():
    run_ranks(on_two_devices, 2, backend="nccl")


def test_backward_is_the_same_twice():
    grads = []
    for _ in range(2):
        layer, x = layer_and_input(torch.bfloat16)
        layer.cuda()(x.cuda()).hidden.float().square().sum().backward()
        grads.append([p.grad for p in layer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def products(device: str, sizes: tuple[int, int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    """The result of a product in float8 and its two gradients."""
    T, D, width = sizes
    g = torch.Generator().manual_seed(0)
    shapes = ((T, D), (width, D), (T, width))
    x, w, dy = (torch.randn(s, generator=g).to(device, dtype) for s in shapes)
    y = float8_linear(x.requires_grad_(), w.requires_grad_())
    y.backward(dy)
    return [each.cpu().float() for each in (y.detach(), x.grad, w.grad)]


@pytest.mark.parametrize("sizes", [(256, 512, 384), (5, 200, 7), (1, 128, 128), (0, 64, 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_products_in_float8_are_those_of_the_host(sizes, dtype):
    if why := why_no_float8(torch.device("cuda")):
        pytest.skip(why)
    # The kernel sums 128 products in another order, with fewer bits than float64.
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-3}[dtype]
    found, expected = products("cuda", sizes, dtype), products("cpu", sizes, dtype)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= tolerance * b.norm()


def test_experts_in_float8_are_those_of_the_host():
    if why := why_no_float8(torch.device("cuda")):
        pytest.skip(why)
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        config = MoEConfig(d_model=256, d_ff=128, num_experts=8, top_k=2, gemm="float8")
        layer, x = MoELayer(config), torch.randn(300, 256)
        layer = layer.to(device, torch.bfloat16)
        x = x.to(device, torch.bfloat16)
        # The routes of the host: a near-tie may fall otherwise on the device.
        replay = None if not results else results[0][0].to(device)
        out = layer(x, replay_indices_TK=replay)
        out.hidden.float().square().sum().backward()
        grads = [p.grad.float().cpu() for p in layer.experts.parameters()]
        results.append([out.aux.topk_indices_TK, out.hidden.detach().float().cpu(), *grads])
    for a, b in zip(results[1][1:], results[0][1:], strict=True):
        assert (a - b).norm() <= 3e-2 * b.norm()


def test_a_device_without_products_in_float8_says_so():
    if not why_no_float8(torch.device("cuda")):
        pytest.skip("this device has them")
    with pytest.raises(ValueError, match="products in float8 must have a device"):
        products("cuda", (2, 3, 4), torch.bfloat16)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16", "float8"])
def test_a_run_on_one_device_resumes_bitwise(precision, tmp_path):
    sections = {"compute": precision}
    if precision == "float8":
        if why := why_no_float8(torch.device("cuda")):
            pytest.skip(why)
        sections = {"compute": "bfloat16", "experts": "float8", "dense": "float8"}
    write_corpus(tmp_path / "text")
    spec = write_spec(tmp_path, precision=sections, sample={"prompt": "def", "tokens": 4})
    losses = []
    for name, stop_after in (("straight", None), ("resumed", 4), ("resumed", None)):
        arguments = [str(spec), "--set", f"run_dir={tmp_path / name}"]
        ((code, _, err),) = run_ranks(on_rank, 1, arguments, stop_after, group=False)
        assert code == (75 if stop_after else 0), err
    for name in ("straight", "resumed"):
        losses.append([e["loss"] for e in events(tmp_path / name, "step")])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6


def test_a_save_in_the_background_is_what_the_device_held(tmp_path):
    # The copy goes into pinned memory, and is only begun when it is asked for.
    spec = ckpt.ArraySpec("model/layers/w", (4, 512, 1024), torch.bfloat16, ((), (), ()))
    pieces = [torch.randn(512, 1024, device="cuda").bfloat16() for _ in range(4)]
    expected = [piece.cpu().clone() for piece in pieces]
    box = tuple((0, size) for size in spec.shape)
    array = ckpt.LocalArray(spec, [box], pieces, stacked=True)
    saver = ckpt.AsyncCheckpointer(
        [ckpt.Tier(name="shared", location=str(tmp_path))], 0, tmp_path / ".lock"
    )
    saver.ready()
    try:
        for step in (1, 2):
            saver.save(info(step, Topology()), [array])
            for piece in pieces:
                piece.zero_()
            (event,) = saver.wait()
            assert event.what == "committed", event.error
            out = [torch.empty_like(piece) for piece in pieces]
            read = ckpt.LocalArray(spec, [box], out, stacked=True)
            ckpt.load(tmp_path, ckpt.read_manifest(tmp_path, step), [read])
            for a, b in zip(out, expected, strict=True):
                assert torch.equal(a.cpu(), b)
            for piece, b in zip(pieces, expected, strict=True):
                piece.copy_(b)
    finally:
        saver.close()


@pytest.mark.parametrize("held", ["cuda", "cpu"])
@pytest.mark.parametrize(("compute", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.05)])
def test_muon_on_the_device_is_muon_on_the_host(held, compute, tolerance):
    """Parameters on the device, or offloaded: in host memory, and orthogonalized on the device."""
    config = ModelConfig(
        vocab_size=300, d_model=64, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=96,
        first_k_dense=1,
    )  # fmt: skip
    moe = MoEConfig(d_model=64, d_ff=48, num_experts=4, top_k=2)
    moved = []
    for where, dtype in (("cpu", "float32"), (held, compute)):
        torch.manual_seed(0)
        model = Decoder(config, moe).to(where)
        device = torch.device("cpu" if not moved else "cuda")
        around = Surroundings(device=device, compute=dtype)
        optimizer = build_optimizer(model, MuonConfig(lr=0.1, weight_decay=0.0), around)
        before = [p.detach().clone() for p in model.parameters()]
        for number, p in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(number)
            p.grad = torch.randn(p.shape, generator=generator).to(where)
        optimizer.step()
        pairs = zip(model.parameters(), before, strict=True)
        moved.append([(p.detach() - was).cpu() for p, was in pairs])
    for host, other in zip(*moved, strict=True):
        assert float((host - other).norm() / host.norm()) < tolerance


def on_rank_that_says_its_kernels(rank: int, arguments: list[str]) -> tuple[int, str, bool]:
    code, _, err = on_rank(rank, arguments, None)
    return code, err, torch.are_deterministic_algorithms_enabled()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_an_exact_run_has_deterministic_kernels_and_equal_bits_on_two_devices(tmp_path):
    write_corpus(tmp_path / "text")
    spec = write_spec(tmp_path, train={"exact": True, "steps": 4})
    found = []
    for world, layout in ((1, "dp_shard=1"), (2, "ep=2")):
        run = tmp_path / str(world)
        arguments = [str(spec), "--set", f"run_dir={run}", "--set", f"parallel.{layout}"]
        for code, err, deterministic in run_ranks(
            on_rank_that_says_its_kernels, world, arguments, group=False
        ):
            assert code == 0, err
            assert deterministic
        found.append([(e["loss"], e["grad_norm"]) for e in events(run, "step")])
    assert found[0] == found[1]
    assert len(found[0]) == 4


def test_an_ordinary_run_keeps_the_fastest_kernels(tmp_path):
    write_corpus(tmp_path / "text")
    spec = write_spec(tmp_path, train={"steps": 2})
    arguments = [str(spec), "--set", f"run_dir={tmp_path / 'run'}"]
    ((code, err, deterministic),) = run_ranks(
        on_rank_that_says_its_kernels, 1, arguments, group=False
    )
    assert code == 0, err
    assert not deterministic
