"""The layer in one process, against a for-loop oracle."""

from __future__ import annotations

import copy

import pytest
import torch

from moe import GroupedExperts, MoEConfig, MoELayer
from moe.experts import packed, workers
from tests.support import oracle

D, F, E, K = 16, 24, 6, 2


def make_layer(seed: int = 0, **fields: object) -> MoELayer:
    torch.manual_seed(seed)
    layer = MoELayer(MoEConfig(**{"d_model": D, "d_ff": F, "num_experts": E, "top_k": K, **fields}))
    with torch.no_grad():
        layer.router.weight.mul_(20)  # decided scores, so that gradients of the weights count
    return layer


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-6)


def oracle_of(layer: MoELayer, x: torch.Tensor):
    c, e = layer.config, layer.experts
    s = layer.shared_experts
    shared = None if s is None else (s.w_gate.weight, s.w_up.weight, s.w_down.weight)
    return oracle.moe_forward(
        x, layer.router.weight, e.w_gate, e.w_up, e.w_down,
        c.top_k, c.score_func, c.norm_topk_prob, shared,
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["loop", "grouped_mm", "packed"])
@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("num_shared_experts", [0, 2])
def test_matches_the_oracle(backend, score_func, norm_topk_prob, num_shared_experts):
    layer = make_layer(
        backend=backend,
        score_func=score_func,
        norm_topk_prob=norm_topk_prob,
        num_shared_experts=num_shared_experts,
        aux_loss_coeff=0.3,
        z_loss_coeff=0.2,
    )
    x = torch.randn(20, D)
    grad_y = torch.randn(20, D)
    inputs = [x.clone().requires_grad_() for _ in range(2)]

    out = layer(inputs[0])
    ((out.hidden * grad_y).sum() + out.aux.aux_loss).backward()
    actual = {n: p.grad.clone() for n, p in layer.named_parameters()}
    layer.zero_grad()
    y, balance, z, counts = oracle_of(layer, inputs[1])
    ((y * grad_y).sum() + 0.3 * balance + 0.2 * z).backward()

    close(out.hidden, y)
    close(out.aux.load_balance_loss, balance)
    close(out.aux.z_loss, z)
    assert out.aux.tokens_per_expert_E.tolist() == counts
    close(inputs[0].grad, inputs[1].grad)
    for name, parameter in layer.named_parameters():
        close(actual[name], parameter.grad)
        assert parameter.grad.abs().sum() > 0, f"{name} got no gradient: the test shows nothing"


@pytest.mark.parametrize("backend", ["loop", "grouped_mm", "packed"])
def test_an_expert_nobody_chose_gets_a_zero_gradient(backend):
    layer = make_layer(backend=backend)
    x = torch.randn(12, D).abs()
    with torch.no_grad():
        layer.router.weight[3] = -10.0
    out = layer(x)
    out.hidden.square().sum().backward()
    assert out.aux.tokens_per_expert_E[3] == 0
    close(out.hidden, oracle_of(layer, x)[0])
    for parameter in layer.experts.parameters():
        assert parameter.grad[3].abs().sum() == 0
        assert parameter.grad[0].isfinite().all()


@pytest.mark.parametrize("backend", ["loop", "grouped_mm", "packed"])
@pytest.mark.parametrize("shape", [(0, D), (0, 7, D), (3, 0, D)])
def test_an_empty_batch_is_ordinary(backend, shape):
    layer = make_layer(backend=backend, num_shared_experts=1)
    x = torch.randn(shape, requires_grad=True)
    out = layer(x)
    (out.hidden.sum() + out.aux.aux_loss).backward()
    assert out.hidden.shape == shape
    assert out.aux.aux_loss == 0
    assert out.aux.tokens_per_expert_E.tolist() == [0] * E
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() == 0, name


def test_leading_dims_do_not_matter():
    layer = make_layer()
    x = torch.randn(2, 3, 5, D)
    torch.testing.assert_close(
        layer(x).hidden, layer(x.view(30, D)).hidden.view(x.shape), rtol=0, atol=0
    )


def test_a_summed_output_has_a_gradient():
    # .sum() hands down an expanded gradient, which grouped_mm itself refuses.
    layer = make_layer(backend="grouped_mm")
    layer(torch.randn(4, D)).hidden.sum().backward()
    assert layer.experts.w_down.grad.abs().sum() > 0


def some_experts(activation: str, bias: bool, dtype=torch.float32) -> GroupedExperts:
    torch.manual_seed(1)
    name, _, limit = activation.partition("@")
    sizes = {"num_experts": E, "top_k": 2, "d_model": D, "d_ff": F}
    fields = {"activation": name, "activation_limit": float(limit or 0), "ffn_bias": bias}
    experts = GroupedExperts(MoEConfig(**sizes, **fields))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return experts.to(dtype)


FORMULAS = ["swiglu", "geglu", "gelu", "relu2", "swiglu_oai", "swiglu_oai@0.5", "swiglu@0.4"]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", FORMULAS)
@pytest.mark.parametrize("backend", ["loop", "grouped_mm", "packed"])
def test_every_path_is_the_formula(backend, activation, bias):
    # Rows that no expert takes, one that three take, an expert without rows, padding at the end.
    source = torch.tensor([0, 4, 6, 4, 2, 3, 6, 0, 4, 5, 0])
    counts = [3, 0, 4, 1, 0, 1]
    experts = some_experts(activation, bias)
    experts.backend = backend
    x, w, grad = torch.randn(7, D), torch.rand(11), torch.randn(7, D)

    inputs = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    y = experts(inputs[0], source, inputs[1], torch.tensor(counts))
    tensors = [*inputs, *experts.parameters()]
    actual = [y, *torch.autograd.grad(y, tensors, grad)]

    rows, weights = list(inputs[0].unbind()), inputs[1]
    sums = [torch.zeros(D) for _ in rows]
    place = 0
    for e, count in enumerate(counts):
        for r in range(place, place + count):
            one = rows[source[r]]
            up = one @ experts.w_up[e] + (experts.b_up[e] if bias else 0)
            gate = up
            if experts.w_gate is not None:
                gate = one @ experts.w_gate[e] + (experts.b_gate[e] if bias else 0)
            name, _, limit = activation.partition("@")
            if limit:
                gate = torch.where(gate > float(limit), float(limit), gate)
                up = torch.where(up.abs() > float(limit), float(limit) * up.sign(), up)
            act = {
                "swiglu_oai": lambda z: z / (1 + torch.exp(-1.702 * z)),
                "swiglu": lambda z: z / (1 + torch.exp(-z)),
                "geglu": lambda z: z * (1 + torch.erf(z / 2**0.5)) / 2,
                "gelu": lambda z: z * (1 + torch.erf(z / 2**0.5)) / 2,
                "relu2": lambda z: torch.where(z > 0, z, 0) ** 2,
            }[name](gate)
            up = up + 1 if name == "swiglu_oai" else up
            h = act * up if experts.w_gate is not None else act
            out = h @ experts.w_down[e] + (experts.b_down[e] if bias else 0)
            sums[source[r]] = sums[source[r]] + weights[r] * out
        place += count
    expected_y = torch.stack(sums)
    expected = [expected_y, *torch.autograd.grad(expected_y, tensors, grad)]
    for a, b in zip(actual, expected, strict=True):
        close(a, b)
    assert all(g.abs().sum() > 0 for g in actual)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("grouped_mm", torch.bfloat16), ("packed", torch.float64), ("loop", torch.bfloat16),
        ("grouped_mm", torch.float16), ("loop", torch.float16),
    ],
)  # fmt: skip
def test_other_dtypes_are_the_plain_path_in_double(backend, dtype):
    tolerance = {torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    experts = some_experts("swiglu", bias=True, dtype=dtype)
    rows = (torch.randn(11, D), torch.arange(11) % 6, torch.rand(11))
    counts = torch.tensor([3, 0, 5, 1, 0, 2])
    outputs = []
    for module, name, to in (
        (experts, backend, dtype),
        (copy.deepcopy(experts).double(), "loop", torch.float64),
    ):
        module.backend = name
        x, w = rows[0].to(dtype).to(to), rows[2].to(dtype).to(to)
        y = module(x, rows[1], w, counts)
        y.square().sum().backward()
        outputs.append([y, *(p.grad for p in module.parameters())])
    for a, b in zip(*outputs, strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).norm() < tolerance * b.norm()


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("skew", ["even", "one expert", "few rows"])
def test_threads_share_the_rows_without_changing_the_sums(monkeypatch, threads, skew):
    # Blocks and shares end inside experts, so that gradients of one expert come from two threads.
    monkeypatch.setattr(packed, "BLOCK_ROWS", 7)
    monkeypatch.setattr(workers, "_WORTH_A_WORKER", 0)
    experts = some_experts("swiglu", bias=True)
    counts = {"even": [20, 11, 0, 9, 30, 3], "one expert": [0, 0, 73, 0, 0, 0],
              "few rows": [0, 1, 0, 0, 0, 1]}[skew]  # fmt: skip
    R = sum(counts)
    generator = torch.Generator().manual_seed(5)
    x, w = torch.randn(40, D, generator=generator), torch.rand(R, generator=generator)
    source = torch.randint(40, (R,), generator=generator)
    before, results = torch.get_num_threads(), []
    try:
        for number in (1, threads, threads):
            torch.set_num_threads(number)
            experts.zero_grad()
            inputs = x.clone().requires_grad_(), w.clone().requires_grad_()
            y = experts(inputs[0], source, inputs[1], torch.tensor(counts))
            y.square().sum().backward()
            results.append([y, *(t.grad for t in inputs), *(p.grad for p in experts.parameters())])
            assert torch.get_num_threads() == number
    finally:
        torch.set_num_threads(before)
    for one, two, again in zip(*results, strict=True):
        close(two, one)
        assert torch.equal(two, again)


def test_threads_work_in_inference_mode(monkeypatch):
    monkeypatch.setattr(workers, "_WORTH_A_WORKER", 0)
    layer, x, before = make_layer(), torch.randn(40, D), torch.get_num_threads()
    expected = layer(x).hidden
    try:
        torch.set_num_threads(2)
        with torch.inference_mode():
            close(layer(x).hidden, expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("backend", ["grouped_mm", "packed"])
@pytest.mark.parametrize("recompute", [False, True])
def test_of_the_hidden_size_only_products_are_kept(backend, recompute):
    layer = make_layer(backend=backend, d_ff=136, recompute_experts=recompute)
    x = torch.randn(64, D)
    plain = make_layer(backend=backend, d_ff=136)(x).hidden
    hidden_sized = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal hidden_sized
        rows = tensor.numel() // 136
        is_parameter = any(tensor.data_ptr() == p.data_ptr() for p in layer.parameters())
        if tensor.shape[-1:] == (136,) and not is_parameter:
            hidden_sized += rows
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
        out = layer(x).hidden
    assert torch.equal(out, plain)
    assert hidden_sized == (0 if recompute else 2 * 64 * K)  # gate and up
    out.square().sum().backward()
    assert layer.experts.w_gate.grad.abs().sum() > 0


def test_backward_is_the_same_twice():
    grads = []
    for _ in range(2):
        layer = make_layer()
        x = torch.randn(64, D, generator=torch.Generator().manual_seed(3))
        layer(x).hidden.square().sum().backward()
        grads.append([p.grad for p in layer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_recomputation_counts_losses_once():
    layer = make_layer(aux_loss_coeff=1.0)
    x = torch.randn(30, D)
    plain = layer(x).aux.aux_loss
    plain.backward()
    expected = layer.router.weight.grad.clone()
    layer.zero_grad()
    out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    out.aux.aux_loss.backward()
    assert torch.equal(out.aux.aux_loss, plain)
    assert torch.equal(layer.router.weight.grad, expected)


def test_autocast_leaves_the_router_in_float32():
    layer = make_layer(num_shared_experts=1)
    x = torch.randn(200, D)
    plain = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = layer(x)
    assert torch.equal(plain.aux.tokens_per_expert_E, cast.aux.tokens_per_expert_E)
    assert torch.equal(plain.aux.aux_loss, cast.aux.aux_loss)
    torch.testing.assert_close(cast.hidden, plain.hidden, rtol=0.1, atol=0.05)
    assert not torch.equal(cast.hidden, plain.hidden), "the experts are cast"


@pytest.mark.parametrize("num_shared_experts", [0, 1])
def test_an_input_of_another_dtype_keeps_it(num_shared_experts):
    out = make_layer(num_shared_experts=num_shared_experts)(torch.randn(5, D).bfloat16())
    assert out.hidden.dtype == torch.bfloat16


def test_a_layer_with_odd_sizes_falls_back_or_says_why():
    assert make_layer(d_model=10, d_ff=7)(torch.randn(5, 10)).hidden.shape == (5, 10)
    layer = make_layer(d_model=10, d_ff=7, backend="grouped_mm")
    with pytest.raises(ValueError, match=r"d_model \(10\) and d_ff \(7\) multiples of 4"):
        layer(torch.randn(5, 10))


def test_bad_configurations_name_the_field_and_the_rule():
    with pytest.raises(ValueError, match=r"^MoEConfig: top_k \(7\) must be at most num_experts"):
        make_layer(top_k=7)
    with pytest.raises(ValueError, match=r"MoEConfig: norm_topk_prob \(true\) must be false"):
        make_layer(top_k=1)
    with pytest.raises(ValueError, match="no_such_field"):
        make_layer(no_such_field=1)


def test_tokens_depend_on_each_other_where_rows_are_bounded():
    layer = make_layer(capacity={"policy": "dropless", "max_tokens_per_rank": 6})
    assert not layer.config.independent_tokens
    assert make_layer().config.independent_tokens
    x = torch.randn(12, D)
    together = layer.eval()(x).hidden
    assert not torch.allclose(together, torch.cat([layer(row[None]).hidden for row in x]))


def test_in_double_the_layers_gradient_is_the_difference_quotient():
    layer = make_layer(d_model=6, d_ff=5, backend="loop").double()
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layer(x).hidden, (x,))
    packed = make_layer(d_model=6, d_ff=5).double()
    assert torch.autograd.gradcheck(lambda x: packed(x).hidden, (x,))
    torch.testing.assert_close(packed(x).hidden, layer(x).hidden, rtol=1e-12, atol=1e-12)


def test_sizes_are_shown_and_a_meta_layer_has_shapes():
    layer = make_layer()
    assert "num_experts=6, top_k=2" in repr(layer)
    assert "d_ff=24" in repr(layer)
    meta = MoELayer(layer.config).to("meta")
    routed = meta.router(torch.empty(7, D, device="meta"))
    assert routed.expert_indices_TK.shape == (7, K)


def test_diagnostics_follow_from_the_counts():
    layer = make_layer()
    recorded = torch.tensor([[0, 1]] * 3 + [[0, 4]])
    aux = layer(torch.randn(4, D), recorded).aux
    assert aux.tokens_per_expert_E.tolist() == [4, 3, 0, 0, 1, 0]
    assert aux.load_imbalance == 4 * 6 / 8
    assert aux.rank_imbalance(2) == 7 * 2 / 8
    assert aux.num_dead_experts == 3
    assert layer(torch.randn(0, D)).aux.load_imbalance == 0
    assert aux.stopwatch.rows == 8
    assert aux.stopwatch.seconds() > 0


def test_shared_experts_have_a_gate_and_the_layers_activation():
    layer = make_layer(num_shared_experts=2, shared_expert_gate=True, activation="relu2",
                       ffn_bias=True)  # fmt: skip
    plain = make_layer(activation="relu2", ffn_bias=True)
    plain.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(5, D)
    s = layer.shared_experts
    h = torch.relu(x @ s.w_up.weight.T + s.w_up.bias) ** 2
    shared = (h @ s.w_down.weight.T + s.w_down.bias) / (
        1 + torch.exp(-x @ layer.shared_gate.weight.T)
    )
    close(layer(x).hidden, plain(x).hidden + shared)
    with pytest.raises(ValueError, match=r"MoEConfig: shared_expert_gate \(true\) must have"):
        make_layer(shared_expert_gate=True)


def test_print_says_which_path_auto_picks():
    assert "backend=auto (packed for torch.float32 on cpu)" in repr(make_layer())
    assert "backend=auto (grouped_mm for torch.bfloat16 on cpu)" in repr(make_layer().bfloat16())


@pytest.mark.parametrize("backend", ["loop", "grouped_mm", "packed"])
@pytest.mark.parametrize("fields", [{"top_k": 3}, {"top_k": 1, "norm_topk_prob": False}])
def test_weights_multiply_the_input_where_the_config_says_so(backend, fields):
    """Llama 4: each expert gets weight · x, and its output is added as it is."""
    layer = make_layer(
        backend=backend, weights_on_input=True, score_func="sigmoid", ffn_bias=True, **fields
    )
    for bias in (layer.experts.b_gate, layer.experts.b_up, layer.experts.b_down):
        torch.nn.init.normal_(bias)
    x = torch.randn(11, D, requires_grad=True)
    out, grad = layer(x), torch.randn(11, D)
    inputs = [x, *layer.parameters()]
    actual = torch.autograd.grad(out.hidden, inputs, grad, allow_unused=True)
    weights = out.aux.tokens_per_expert_E
    assert weights.sum() == 11 * fields["top_k"]

    scores, e = (x @ layer.router.weight.T).sigmoid(), layer.experts
    rows = []
    for t, token in enumerate(x.unbind()):
        best = scores[t].topk(fields["top_k"])
        total = best.values.sum() if layer.config.norm_topk_prob else 1
        y = torch.zeros(D)
        for i, score in zip(best.indices, best.values, strict=True):
            z = token * (score / total)
            gate, up = z @ e.w_gate[i] + e.b_gate[i], z @ e.w_up[i] + e.b_up[i]
            y = y + (gate / (1 + torch.exp(-gate)) * up) @ e.w_down[i] + e.b_down[i]
        rows.append(y)
    expected = torch.stack(rows)
    close(out.hidden, expected)
    wanted = torch.autograd.grad(expected, inputs, grad, allow_unused=True)
    for a, b in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_limit_needs_a_gate():
    with pytest.raises(ValueError, match=r"activation \(relu2\) must be swiglu, geglu") as error:
        make_layer(activation="relu2", activation_limit=7.0)
    assert "\n" not in str(error.value)
