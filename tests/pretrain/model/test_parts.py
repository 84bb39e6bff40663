"""The decoder, first values, optimizer, schedule, barrier, metrics and summary, each alone."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from parallel import (
    ParallelDims,
    Topology,
    apply_expert_parallel,
    apply_fsdp,
    clip_grad_norm,
    scale_gradients,
)
from pretrain.errors import InputError
from pretrain.model.decoder import Decoder
from pretrain.model.init import init_parameters
from pretrain.model.rotary import rope_frequencies, rotate, turns
from pretrain.observe.summary import heat_map
from pretrain.optim import AdamWConfig, ScheduleConfig, build_adamw
from pretrain.parallelize.layouts import parameter_layouts
from pretrain.parallelize.micro_batches import (
    LocalBatch,
    forward_backward,
    mask_of,
    next_token_loss,
)
from pretrain.parallelize.results import RoutingStats, StepResult
from pretrain.parts.step import Action, Decision, Report, Reports
from pretrain.state.arrays import training_arrays
from pretrain.state.progress import Progress
from pretrain.train.barrier import decide
from tests.parallel.test_apply import full
from tests.support.jobs import make_spec
from tests.support.ranks import run_ranks


def build(spec, topology: Topology, rank: int, dims=None) -> tuple[Decoder, dict]:
    with torch.device("meta"):
        model = Decoder(spec.model, spec.moe)
    if dims is not None:
        apply_expert_parallel(model, dims.ep_mesh)
        apply_fsdp(model, dims, blocks=list(model.blocks.values()))
    model.to_empty(device="cpu")
    layouts = parameter_layouts(model, topology)
    init_parameters(model, layouts, rank, 5, spec.model.num_layers)
    return model, layouts


def batches(spec, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = [2] * (count - 1) + [1]
    shape = spec.data.seq_len + 1
    return [torch.randint(0, spec.model.vocab_size, (n, shape), generator=generator) for n in sizes]


def parity_on_rank(rank: int, spec, topology: Topology, count: int):
    dims = ParallelDims.build(topology, "cpu")
    model, _ = build(spec, topology, rank, dims)
    every = batches(spec, count)
    rounds = -(-count // dims.dp_size)
    mine = [every[i : i + 1] for i in range(dims.dp_rank, rounds * dims.dp_size, dims.dp_size)]
    empty = torch.empty((0, spec.data.seq_len + 1), dtype=torch.int64)
    result = forward_backward(
        model, [b[0] if b else empty for b in mine], 1000, device=torch.device("cpu")
    )
    values = {name: full(p.detach()) for name, p in model.named_parameters()}
    grads = {name: full(p.grad) for name, p in model.named_parameters()}
    norm = clip_grad_norm(model, dims, 1e-4)
    again = clip_grad_norm(model, dims, 1e-3)
    assert clip_grad_norm(model, dims, 1.0) == again, "a norm below is left"
    loads = result.routing.tokens_per_expert_LE
    return float(result.loss_sum), (norm, again), loads, (values, grads) if rank == 0 else None


@pytest.mark.parametrize(
    ("topology", "count"),
    [
        (Topology(dp_shard=2, ep=2), 4),
        (Topology(dp_shard=2), 3),
        pytest.param(Topology(dp_shard=4, ep=4), 5, marks=pytest.mark.slow),
        pytest.param(Topology(dp_shard=4, ep=2), 2, marks=pytest.mark.slow),
        (Topology(dp_replicate=2, dp_shard=2, ep=2), 5),
    ],
    ids=str,
)
def test_the_model_on_ranks_is_the_model_in_one_process(tmp_path, topology, count):
    spec = make_spec(tmp_path, moe={"num_shared_experts": 1, "z_loss_coeff": 0.01})
    model, _ = build(spec, Topology(), 0)
    alone = forward_backward(model, batches(spec, count), 1000, device=torch.device("cpu"))
    square = sum(float(p.grad.double().square().sum()) for p in model.parameters())

    results = run_ranks(parity_on_rank, topology.world, spec, topology, count)

    assert sum(r[0] for r in results) == pytest.approx(float(alone.loss_sum), rel=1e-5)
    assert square > 1e-7
    for _, norms, *_ in results:
        assert norms == pytest.approx((math.sqrt(square), 1e-4), rel=1e-5)
    assert torch.equal(sum(r[2] for r in results), alone.routing.tokens_per_expert_LE)
    values, grads = results[0][3]
    for name, parameter in model.named_parameters():
        assert torch.equal(values[name], parameter.detach()), f"{name} began with other values"
        error = (grads[name] - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-5, f"{name}: {error}"


def test_the_decoder_is_causal_and_positions_matter(tmp_path):
    spec = make_spec(tmp_path)
    model, _ = build(spec, Topology(), 0)
    tokens = batches(spec, 1)[0][:, :-1]
    changed = tokens.clone()
    changed[:, 20:] = 7
    with torch.no_grad():
        a, b = model(tokens).logits, model(changed).logits
        moved = model(tokens.roll(1, 1)).logits
    torch.testing.assert_close(a[:, :20], b[:, :20], rtol=1e-5, atol=1e-5)
    assert (a[:, 20:] - b[:, 20:]).abs().max() > 1e-3
    assert (moved[:, 1:] - a[:, :-1]).abs().max() > 1e-4
    assert len(model(tokens).aux) == 2, "the first layer is dense"


def test_rotation_keeps_lengths_and_depends_on_distance_alone():
    x = torch.randn(1, 1, 1, 8).expand(1, 1, 16, 8)
    y = torch.randn(1, 1, 1, 8).expand(1, 1, 16, 8)
    by = turns(rope_frequencies(8, 10000.0, None, torch.device("cpu")), torch.arange(16))
    q, k = rotate(x, by), rotate(y, by)
    torch.testing.assert_close(q.norm(dim=-1), x.norm(dim=-1))
    dots = (q[0, 0] @ k[0, 0].T).diagonal(3)
    torch.testing.assert_close(dots, dots[:1].expand_as(dots))
    assert (q[0, 0] @ k[0, 0].T).diagonal(1)[0] != dots[0]


def test_masked_targets_do_not_count():
    logits = torch.randn(2, 3, 10)
    targets = torch.tensor([[1, 2, -1], [-1, 4, 5]])
    log_probs = logits.log_softmax(-1)
    expected = -sum(log_probs[b, s, targets[b, s]] for b, s in [(0, 0), (0, 1), (1, 1), (1, 2)])
    torch.testing.assert_close(next_token_loss(logits, targets), expected)
    assert next_token_loss(logits[:0], targets[:0]) == 0


def test_moments_made_at_once_change_nothing():
    torch.manual_seed(0)
    models = [torch.nn.Linear(4, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    config = AdamWConfig(lr=0.1, eps=1e-6)
    ours = build_adamw(models[0], config)
    theirs = torch.optim.AdamW(
        [
            {"params": [models[1].weight], "weight_decay": 0.1},
            {"params": [models[1].bias], "weight_decay": 0.0},
        ],
        lr=0.1, betas=(0.9, 0.95), eps=1e-6, fused=True,
    )  # fmt: skip
    for _ in range(3):
        for model, optimizer in zip(models, (ours, theirs), strict=True):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_checkpoints_take_whatever_an_optimizer_keeps_of_each_parameter(tmp_path):
    spec = make_spec(tmp_path)
    model = Decoder(spec.model, spec.moe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, parameter in enumerate(model.parameters()):
        optimizer.state[parameter] = {"momentum_buffer": torch.full_like(parameter, number)}
    layouts = parameter_layouts(model, Topology())
    arrays = {a.spec.name: a for a in training_arrays(model, model, optimizer, layouts, 0)}
    kept = {name for name in arrays if name.startswith("optimizer/")}
    buffers = {name for name, _ in model.named_buffers()}
    assert kept == {
        a.replace("model/", "optimizer/momentum_buffer/", 1)
        for a in arrays
        if a.startswith("model/") and a.split("/")[-1] not in {b.split(".")[-1] for b in buffers}
    }
    numbers = {name: number for number, (name, _) in enumerate(model.named_parameters())}
    pieces = arrays["optimizer/momentum_buffer/layers/attention/wq/weight"].pieces
    assert [float(p[0, 0]) for p in pieces] == [
        numbers[f"layers.{i}.attention.wq.weight"] for i in range(spec.model.num_layers)
    ]


def test_schedules():
    cosine = ScheduleConfig(warmup_steps=4, min_lr_ratio=0.1)
    assert [cosine.ratio(s, 14) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert cosine.ratio(4, 14) == 1.0
    assert cosine.ratio(9, 14) == pytest.approx(0.55)
    assert cosine.ratio(14, 14) == pytest.approx(0.1)
    wsd = ScheduleConfig(kind="wsd", warmup_steps=2, decay_steps=4, min_lr_ratio=0.0)
    assert [wsd.ratio(s, 10) for s in range(10)] == [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    linear = ScheduleConfig(kind="linear", warmup_steps=2, min_lr_ratio=0.5)
    assert [linear.ratio(s, 6) for s in range(7)] == [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5]
    constant = ScheduleConfig(kind="constant", warmup_steps=2)
    assert [constant.ratio(s, 4) for s in range(4)] == [0.5, 1, 1, 1]


def report(**fields) -> Report:
    values = {
        "loss_sum": 20.0, "target_tokens": 10, "grad_square_sum": 4.0, "stop_requested": 0,
        "save_requested": 0,
        "step_seconds": 1.0, "data_wait_seconds": 0.1, "exposed_seconds": 0.2, "expert_rows": 10,
        "expert_seconds": 1.0,
        "bad_layer": -1,
    }  # fmt: skip
    return Report(**{**values, **fields})


def decided(reports: list[Report], planned: int, loss_scale: float | None = None) -> Decision:
    return decide(Reports.of(reports), planned, loss_scale)


def test_the_barrier_decides_from_all_reports():
    decision = decided([report(), report(loss_sum=40.0, step_seconds=3.0)], 20)
    assert decision.action is Action.COMMIT
    assert decision.loss == 3.0
    assert decision.grad_norm == pytest.approx(math.sqrt(8))
    assert decision.step_seconds == 3.0
    assert not decision.stop
    assert decided([report(), report(stop_requested=1)], 20).stop
    assert not decision.save
    assert decided([report(save_requested=1), report()], 20).save
    half = decided([report(), report(target_tokens=0, loss_sum=0)], 20)
    assert half.loss == 2.0, "the mean is over the targets there were"
    assert half.grad_norm == pytest.approx(2 * math.sqrt(8))


@pytest.mark.parametrize(
    "fields",
    [{"loss_sum": math.nan}, {"loss_sum": math.inf}, {"grad_square_sum": math.nan},
     {"grad_square_sum": math.inf}],
)  # fmt: skip
def test_one_rank_that_is_not_finite_makes_all_skip(fields):
    assert decided([report(), report(**fields)], 20).action is Action.SKIP
    assert decided([report(target_tokens=0), report(target_tokens=0)], 20).action is Action.SKIP


def test_a_router_that_is_not_finite_is_named_although_the_loss_is():
    decision = decided([report(bad_layer=3), report(), report(bad_layer=2)], 30)
    assert decision.action is Action.SKIP
    assert decision.why == "router logits of layer 2 are not finite on rank 2"


@pytest.mark.parametrize(
    ("scale", "fields", "reason"),
    [
        (65536.0, {"grad_square_sum": math.inf}, "overflow"),
        (2.0, {"grad_square_sum": math.nan}, "overflow"),
        (1.0, {"grad_square_sum": math.inf}, "not_finite"),
        (None, {"grad_square_sum": math.inf}, "not_finite"),
        (65536.0, {"loss_sum": math.nan, "grad_square_sum": math.nan}, "not_finite"),
        (65536.0, {"loss_sum": math.inf, "grad_square_sum": math.nan}, "not_finite"),
        (65536.0, {"bad_layer": 1, "grad_square_sum": math.nan}, "router_not_finite"),
        (65536.0, {"loss_sum": math.nan}, "not_finite"),
    ],
)
def test_an_overflow_is_of_gradients_alone(scale, fields, reason):
    decision = decided([report(), report(**fields)], 20, scale)
    assert decision.action is Action.SKIP
    assert decision.reason == reason
    assert decision.overflow == (reason == "overflow")
    assert decision.loss_scale == scale
    assert ("half of it is next" in decision.why) == decision.overflow


def test_the_loss_scale_doubles_after_steps_in_a_row_without_an_overflow():
    progress = Progress(step=5, loss_scale=8.0)
    for scale, steps in [(8.0, 1), (8.0, 2), (16.0, 0), (16.0, 1)]:
        progress = progress.after_commit(growth_steps=3)
        assert (progress.loss_scale, progress.steps_at_loss_scale) == (scale, steps)
    progress = progress.after_overflow()
    assert progress == Progress(step=5, loss_scale=8.0)
    assert Progress(step=5).after_commit(1) == Progress(step=5), "there is none but in float16"


def test_the_loads_of_a_step_are_summed_over_ranks_once(monkeypatch):
    sums = []

    def doubled(counts: torch.Tensor) -> SimpleNamespace:
        sums.append(counts.mul_(2))
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr("pretrain.parallelize.results.all_reduce", doubled)
    zero = torch.zeros(1, 2)
    routing = RoutingStats(torch.tensor([[3, 5]]), zero, zero, zero, zero, zero)
    for _ in range(2):
        assert routing.everywhere_LE.tolist() == [[6, 10]]
    assert len(sums) == 1
    assert routing.tokens_per_expert_LE.tolist() == [[3, 5]], "this rank's stay"


def test_auxiliary_losses_of_a_step_are_summed_over_its_tokens(tmp_path):
    losses = {"aux_loss_coeff": 0.5, "seq_aux_loss_coeff": 0.25, "z_loss_coeff": 0.125}
    spec = make_spec(tmp_path, moe={"num_experts": 4, "top_k": 2, "d_ff": 24, **losses})
    model, _ = build(spec, Topology(), 0)
    some = batches(spec, 2)
    sums = torch.zeros(2, 4, dtype=torch.float64)
    for batch in some:
        for row, aux in enumerate(model(batch[:, :-1]).aux):
            each = [aux.load_balance_loss, aux.sequence_balance_loss, aux.z_loss]
            weighted = 0.5 * each[0] + 0.25 * each[1] + 0.125 * each[2]
            sums[row] += batch[:, 1:].numel() * torch.stack([*each, weighted]).detach().double()
    result = forward_backward(model, some, 1.0, device=torch.device("cpu"))
    found = result.routing.aux_loss_sum_LA
    assert not found.requires_grad, "the graph of the step would stay"
    torch.testing.assert_close(found, sums, rtol=1e-5, atol=1e-4)
    assert (found > 0).all()


def router_gradient(model: torch.nn.Module) -> torch.Tensor:
    routers = [p.grad for name, p in model.named_parameters() if name.endswith("router.weight")]
    return torch.cat([grad.double() for grad in routers if grad is not None])


def test_masked_labels_change_no_coefficient_and_padding_is_no_token(tmp_path):
    """The gradient of the auxiliary losses alone: each micro-batch's mean, times its targets."""
    losses = {"aux_loss_coeff": 0.5, "seq_aux_loss_coeff": 0.25, "z_loss_coeff": 0.125}
    spec = make_spec(tmp_path, moe={"num_experts": 4, "top_k": 2, "d_ff": 24, **losses})
    model, _ = build(spec, Topology(), 0)
    plain = batches(spec, 2)[0]
    part = LocalBatch(masked_targets=True)

    def aux_gradient(batch: torch.Tensor) -> tuple[torch.Tensor, StepResult]:
        """Per target: what the auxiliary losses of a micro-batch add to the routers' gradient."""
        model.zero_grad()
        cpu = torch.device("cpu")
        result = forward_backward(model, [batch], 1.0, device=cpu, local_batch=part)
        both = router_gradient(model)
        model.zero_grad()
        inputs_BS, targets_BS = part.inputs_and_targets(batch)
        out = model(inputs_BS, **mask_of(part.routed_tokens(batch), cpu))
        next_token_loss(out.logits, targets_BS).backward()
        return (both - router_gradient(model)) / int((targets_BS >= 0).sum()), result

    half = plain.clone()
    half[:, 1::2] = ~half[:, 1::2]
    expected, _ = aux_gradient(plain)
    torch.testing.assert_close(aux_gradient(half)[0], expected, rtol=1e-3, atol=1e-5)

    # The batch's last tokens become inputs, which they are not without padding after them.
    expected, wanted = aux_gradient(F.pad(plain, (0, 1), value=-1))
    got, result = aux_gradient(F.pad(plain, (0, 7), value=-1))
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)
    assert result.routing is not None
    assert wanted.routing is not None
    assert result.routing.tokens_L.tolist() == [plain.numel()] * 2
    for name in ("tokens_per_expert_LE", "aux_loss_sum_LA", "entropy_sum_L", "moved_L3"):
        ours, theirs = getattr(result.routing, name), getattr(wanted.routing, name)
        torch.testing.assert_close(
            ours, theirs, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_gradients_are_scaled_in_place():
    model = torch.nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.grad.clone()
    scale_gradients(model, 0.5)
    assert torch.equal(model.weight.grad, before * 0.5)


def test_the_heat_map_is_dark_where_the_load_is():
    text = heat_map([3], [[0, 10, 20, 10]])
    assert "layer   3 |  ==@@==| max/mean 2.00, unused 1" in text


def test_machines_on_which_tokens_reach_too_many_nodes_are_refused(tmp_path):
    moe = {"num_experts": 8, "top_k": 2, "n_groups": 4, "topk_groups": 1}
    spec = make_spec(tmp_path, moe=moe, parallel={"ep": 4, "max_nodes_per_token": 1})
    topology = spec.topology(4)
    spec.check_nodes(topology, ranks_per_node=2)
    two = make_spec(tmp_path, moe={**moe, "topk_groups": 2},
                    parallel={"ep": 4, "max_nodes_per_token": 1})  # fmt: skip
    two.check_nodes(topology, ranks_per_node=4)
    wide = Topology(dp_shard=2, tp=4)
    make_spec(tmp_path).check_nodes(wide, ranks_per_node=4)
    with pytest.raises(
        InputError, match=r"parallel.tp \(4\) must divide the ranks of a node \(2\)"
    ):
        make_spec(tmp_path).check_nodes(wide, ranks_per_node=2)
    insisted = make_spec(tmp_path, parallel={"tp_across_nodes": True})
    insisted.check_nodes(wide, ranks_per_node=2)
    with pytest.raises(InputError, match=r"max_nodes_per_token \(1\) must be at least 2"):
        two.check_nodes(topology, ranks_per_node=2)


def test_biases_begin_at_zero_and_the_shared_gate_does_not(tmp_path):
    spec = make_spec(tmp_path, moe={"ffn_bias": True, "num_shared_experts": 1,
                                    "shared_expert_gate": True})  # fmt: skip
    model = Decoder(spec.model, spec.moe)
    layouts = parameter_layouts(model, Topology())
    init_parameters(model, layouts, 0, 5, spec.model.num_layers)
    moe = model.blocks[1].moe
    for bias in (moe.experts.b_gate, moe.experts.b_up, moe.experts.b_down,
                 moe.shared_experts.w_up.bias):  # fmt: skip
        assert bias.abs().sum() == 0
    assert moe.shared_gate.weight.abs().sum() > 0
    decayed, free = build_adamw(model, AdamWConfig(lr=0.1, weight_decay=0.1)).param_groups
    assert any(p is moe.experts.w_up for p in decayed["params"])
    assert any(p is moe.experts.b_up for p in free["params"])
    assert model.norm.weight.eq(1).all()
