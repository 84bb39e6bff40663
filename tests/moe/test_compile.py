"""torch.compile and torch.export of a layer and of a model with layers."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from moe import MoELayer, MoEOutput
from moe.experts.operator import experts_operator
from moe.experts.weights import ExpertWeights
from moe.rows import Rows
from tests.moe.test_layer import D, make_layer

# torch's own: its tracer makes an instance of autograd.Function.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

CASES: list[dict[str, Any]] = [
    {}, {"backend": "loop"}, {"backend": "grouped_mm"}, {"backend": "grouped_mm", "cast": True},
    {"num_shared_experts": 1, "shared_expert_gate": True, "ffn_bias": True, "activation": "relu2"},
    {"backend": "grouped_mm", "recompute_experts": True, "cast": True, "ffn_bias": True},
    {"recompute_experts": True, "score_func": "sigmoid", "expert_bias": True, "n_groups": 3},
    {"capacity": {"policy": "fixed", "capacity_factor": 0.9}, "seq_aux_loss_coeff": 0.1},
    {"capacity": {"policy": "fixed", "drop_policy": "position", "capacity_factor": 0.9}},
    {"capacity": {"policy": "straggler_aware"}}, {"capacity": {"max_tokens_per_rank": 20}},
    {"routing": "expert_choice"}, {"routing": "sinkhorn"}, {"balancing": "quantile"},
    {"activation": "swiglu_oai", "activation_limit": 0.5, "router_bias": True,
     "backend": "grouped_mm", "cast": True, "weights_on_input": True,
     "score_func": "sqrtsoftplus"},
]  # fmt: skip


def a_layer(fields: dict[str, Any]) -> tuple[MoELayer, torch.dtype]:
    dtype = torch.bfloat16 if fields.get("cast") else torch.float32
    fields = {name: value for name, value in fields.items() if name != "cast"}
    if "n_groups" in fields:
        fields |= {"topk_groups": 2, "topk_per_group": 1}
    return make_layer(aux_loss_coeff=0.1, **fields).to(dtype), dtype


class Model(nn.Module):
    """Two blocks with a layer each, and losses added up, as a user would write them."""

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.layers = nn.ModuleList(make_layer(seed, **fields) for seed in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        losses = x.new_zeros(())
        for norm, layer in zip(self.norms, self.layers, strict=True):
            hidden, aux = layer(norm(x))
            x, losses = x + hidden, losses + aux.aux_loss
        return x, losses


@pytest.fixture(autouse=True)
def _no_compiled_code_of_other_tests():
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "fields",
    [
        *(CASES[at] for at in (0, 1, 3, 4)),
        # The third is exported below.
        *(pytest.param(CASES[at], marks=pytest.mark.slow) for at in (2, *range(5, len(CASES)))),
    ],
    ids=str,
)
def test_a_layer_is_one_graph_and_lengths_compile_once_more_at_most(fields):
    layer, dtype = a_layer(fields)
    graphs = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, backend=count, fullgraph=True)
    for length in (7, 12, 30, 5):
        x = torch.randn(2, length, D).to(dtype)
        expected, actual = layer(x), compiled(x)
        torch.testing.assert_close(actual.hidden, expected.hidden, rtol=1e-5, atol=1e-6)
        assert torch.equal(actual.aux.topk_indices_TK, expected.aux.topk_indices_TK)
        assert torch.equal(actual.aux.num_dropped, expected.aux.num_dropped)
        assert actual.aux.stopwatch is None
        assert expected.aux.stopwatch is not None
    assert len(graphs) <= 2  # for the first length, and for any


def compare(layer: nn.Module, compiled: Any, x: torch.Tensor, tolerance: float) -> None:
    results = []
    for run in (layer, compiled):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        out, loss = run(leaf)
        (out.float().square().mean() + loss).backward()
        results.append([out, loss, leaf.grad, *(p.grad for p in layer.parameters())])
    for expected, actual in zip(*results, strict=True):
        assert (actual.double() - expected.double()).norm() <= tolerance * expected.double().norm()
        assert expected.norm() > 0


@pytest.mark.slow
@pytest.mark.parametrize("fields", CASES[:8], ids=str)
def test_a_compiled_models_gradients_are_those_of_eager_mode(fields):
    cast = fields.get("cast", False)
    model = Model(
        **{name: value for name, value in fields.items() if name not in ("cast", "n_groups")}
    )
    model, dtype = (model.bfloat16(), torch.bfloat16) if cast else (model, torch.float32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for length in (7, 12):
        compare(model, compiled, torch.randn(2, length, D).to(dtype), 1e-2 if cast else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "loop", "grouped_mm"])
def test_inductor_compiles_a_whole_model_in_float32(backend):
    model = Model(backend=backend)
    compiled = torch.compile(model, fullgraph=True)
    for length in (7, 12):
        compare(model, compiled, torch.randn(2, length, D), 1e-5)


@pytest.mark.parametrize(
    ("fields", "strict"),
    [
        *((CASES[at], False) for at in (0, 1, 2, 7, 9)),
        # A strict export traces as torch.compile does, which is above.
        *((CASES[at], True) for at in (0, 9)),
        *(pytest.param(CASES[at], True, marks=pytest.mark.slow) for at in (1, 2, 7)),
    ],
    ids=str,
)
def test_an_exported_layer_takes_other_lengths(fields, strict):
    layer, _ = a_layer(fields)
    shapes = ({1: torch.export.Dim.DYNAMIC}, None, None)
    exported = torch.export.export(
        layer, (torch.randn(2, 9, D), None, None), dynamic_shapes=shapes, strict=strict
    ).module()
    x = torch.randn(2, 13, D)
    actual, expected = exported(x, None, None), layer(x)
    torch.testing.assert_close(actual.hidden, expected.hidden, rtol=1e-5, atol=1e-6)
    assert torch.equal(actual.aux.topk_indices_TK, expected.aux.topk_indices_TK)


def test_an_exported_layer_can_be_saved_and_loaded():
    layer, x = make_layer(), torch.randn(2, 9, D)
    file = io.BytesIO()
    torch.export.save(torch.export.export(layer, (x,)), file)
    file.seek(0)
    out = torch.export.load(file).module()(x)
    assert isinstance(out, MoEOutput)
    torch.testing.assert_close(out.hidden, layer(x).hidden, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("backend", ["packed", "loop", "grouped_mm"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_the_operator_has_the_gradients_of_its_backend(backend, activation, keep):
    experts = make_layer(backend=backend, activation=activation, ffn_bias=True).experts
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    # Rows that no expert takes or that two take, an expert without rows, two rows of padding.
    x, weights = torch.randn(7, D), torch.rand(10)
    source, counts = (
        torch.tensor([0, 4, 6, 4, 2, 3, 6, 0, 9, 9]) % 7,
        torch.tensor([3, 0, 4, 0, 0, 1]),
    )
    results = []
    for operator in (False, True):
        experts.zero_grad()
        leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        if operator:
            e = experts
            own = ExpertWeights(e.w_gate, e.w_up, e.w_down, e.b_gate, e.b_up, e.b_down)
            rows = Rows(leaves[0], source, leaves[1], counts)
            y = experts_operator(rows, own, activation, backend, keep)
        else:
            y = experts(leaves[0], source, leaves[1], counts)
        y.square().sum().backward()
        results.append([y, *(t.grad for t in leaves), *(p.grad for p in experts.parameters())])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["packed", "loop"])
def test_torch_checks_the_operators(backend):
    layer = make_layer()
    e = layer.experts
    x, weights = torch.randn(7, D, requires_grad=True), torch.rand(8, requires_grad=True)
    source, counts = torch.tensor([0, 4, 6, 4, 2, 3, 6, 0]), torch.tensor([3, 0, 4, 0, 0, 1])
    args = (x, source, weights, counts, e.w_gate, e.w_up, e.w_down, None, None, None)
    torch.library.opcheck(torch.ops.convoy.experts, (*args, "swiglu", backend, True))
    turned = torch.randn(D, 7).t().requires_grad_()
    torch.library.opcheck(torch.ops.convoy.experts, (turned, *args[1:], "swiglu", backend, True))
    chosen = torch.tensor([[0, 1], [0, 2], [0, 1]])
    scores = torch.rand(3, 4)
    room = [torch.arange(4)], [torch.tensor([2, 2, 2, 2])]
    torch.library.opcheck(torch.ops.convoy.place, (chosen, scores, scores, *room))
    plan = [60, 40], 1.25, True
    torch.library.opcheck(torch.ops.convoy.place_by_plan, (chosen, scores, scores, *plan))
