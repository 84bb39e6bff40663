"""The contract of dispatchers, as a test class.

Derive a class whose name begins with ``Test`` and set its attributes; pytest runs the rest, on real
processes over gloo::

    from moe.testing import DispatcherContract

    class TestMine(DispatcherContract):
        fields = {"dispatcher": "my_package.my_module:MyDispatcher"}

The dispatchers of this repository pass the same class. The tests need torch alone.

Legend: D d_model, F d_ff, E experts, K top_k.
"""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from moe.config import MoEConfig
from moe.layer import MoELayer
from parallel import ParallelDims, Topology, apply_expert_parallel

D, F, E, K = 16, 24, 8, 3
MAX_TOKENS = 24
"""The most tokens of one call on any rank, for ``max_tokens_per_call``."""
CASES = ("even", "one rank has none", "none at all", "one token", "all to one rank", "replayed")
_OF_EXCHANGE = ("dispatcher", "overlap_chunks", "max_tokens_per_call", "backend")
"""Fields that must not change a number."""

Result = dict[str, Any]


def make_layer(**fields: Any) -> MoELayer:
    """A small layer, equal in every process."""
    torch.manual_seed(7)
    layer = MoELayer(
        MoEConfig(**{"d_model": D, "d_ff": F, "num_experts": E, "top_k": K,
                     "num_shared_experts": 1, **fields})
    )  # fmt: skip
    with torch.no_grad():
        layer.router.weight.mul_(20)
    return layer


def tokens_of(case: str, world: int) -> list[Tensor]:
    """The tokens that each rank brings."""
    generator = torch.Generator().manual_seed(11)
    sizes = {
        "one rank has none": [0, 13, 24, 9][:world],
        "none at all": [0] * world,
        "one token": [0] * (world - 1) + [1],
    }.get(case, [17] * world)
    return [torch.randn(n, D, generator=generator) for n in sizes]


def one_pass(layer: MoELayer, x: Tensor, case: str) -> Result:
    """Output and gradients of one rank's tokens."""
    x = x.clone().requires_grad_()
    recorded_TK = None
    if case == "all to one rank":
        recorded_TK = torch.tensor([[4, 5, 6]]).expand(len(x), K).clone()
    elif case == "replayed":
        recorded_TK = (torch.arange(len(x)).unsqueeze(1) + torch.tensor([0, 3, 5])) % E
    layer.zero_grad()
    out = layer(x, recorded_TK)
    (out.hidden.square().sum() + out.aux.aux_loss).backward()
    moved = int(out.aux.num_dropped), int(out.aux.num_rerouted)
    return {"hidden": out.hidden.detach(), "x": x.grad, "moved": moved}


def passes_on_rank(
    rank: int, world: int, fields: dict[str, Any], nodes: int, prepare: Callable[[int], None] | None
) -> list[Result]:
    """Two passes of each case on a rank, with gradients summed over ranks."""
    dims = ParallelDims.build(
        Topology(dp_shard=world, ep=world), "cpu", ranks_per_node=world // nodes
    )
    if prepare is not None:
        prepare(world)
    layer = make_layer(**fields)
    apply_expert_parallel(layer, dims.ep_mesh, dims.ep_node_meshes)
    _check_copies(layer)
    results = []
    for case in CASES:
        for _ in range(2):
            result = one_pass(layer, tokens_of(case, world)[rank], case)
            for name, parameter in layer.named_parameters():
                grad: Any = parameter.grad
                if "experts." in name and "shared" not in name:
                    grad = grad.full_tensor()
                else:
                    dist.all_reduce(grad)
                result[name] = grad.clone()
            results.append(result)
    return results


def _check_copies(layer: MoELayer) -> None:
    """A copy shares the process groups, and a pickle does without them."""
    assert vars(copy.deepcopy(layer.dispatcher)).keys() == vars(layer.dispatcher).keys()
    pickle.dumps(layer.dispatcher.__getstate__().get("group"))


def _rank_main(
    rank: int, world: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    torch.save(function(rank, *arguments), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def run_ranks(function: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
    """``function(rank, *arguments)`` in ``world`` processes with a group of gloo, and what each
    returned. The function must be importable."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank_main, (world, folder, function, arguments), nprocs=world)
        # The file is this process's own.
        return [torch.load(Path(folder, f"{r}.pt"), weights_only=False) for r in range(world)]


class DispatcherContract:
    """Outputs, gradients and counts are those of one process, whatever the routing."""

    fields: ClassVar[dict[str, Any]] = {}
    """Of MoEConfig: at least ``dispatcher``."""
    world: ClassVar[int] = 2
    """Ranks, which share 8 experts."""
    nodes: ClassVar[int] = 1
    """Nodes, which share the ranks."""
    prepare: ClassVar[Callable[[int], None] | None] = None
    """A static method that every rank calls first, with the number of ranks."""

    def run_ranks(self, function: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
        """See :func:`run_ranks`; for a program that has a way of its own to start ranks."""
        return run_ranks(function, world, *arguments)

    def test_one_process_and_ranks_agree(self) -> None:
        """In every case of :data:`CASES`, twice with equal bits."""
        arguments = (self.world, self.fields, self.nodes, type(self).prepare)
        results = self.run_ranks(passes_on_rank, self.world, *arguments)
        plain = {name: v for name, v in self.fields.items() if name not in _OF_EXCHANGE}
        reference = make_layer(**plain)
        for number, case in enumerate(CASES):
            sums = {name: torch.zeros_like(p) for name, p in reference.named_parameters()}
            for rank, x in enumerate(tokens_of(case, self.world)):
                expected = one_pass(reference, x, case)
                actual, again = results[rank][2 * number : 2 * number + 2]
                assert actual["moved"] == expected["moved"], case
                for key in ("hidden", "x"):
                    error = (actual[key] - expected[key]).abs()
                    assert (error <= 1e-6 + 1e-5 * expected[key].abs()).all(), f"{case}: {key}"
                for key, value in actual.items():
                    assert key == "moved" or torch.equal(value, again[key]), f"{case}: {key} moves"
                for name, parameter in reference.named_parameters():
                    assert parameter.grad is not None
                    sums[name] += parameter.grad
            for name, expected_grad in sums.items():
                for result in results:
                    error = (result[2 * number][name] - expected_grad).norm()
                    assert error <= 1e-5 * expected_grad.norm() + 1e-7, f"{case}: {name}"
