"""Cases of torch's own distributed tensors and schedules, in the release that runs this bench."""

from __future__ import annotations

from bench.museum_peers.frame import Answer, peer_case, run_gloo

_HERE = ("torch==2.13.0",)


def _strided(rank: int) -> list[float]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(5.0), mesh, [Replicate()])
    local = x.redistribute(mesh, [_StridedShard(0, split_factor=2)]).to_local()
    return [float(value) for value in local]


@peer_case(
    "pytorch/pytorch#168134",
    went_wrong="A dimension that two axes shard unevenly was split into other pieces than the "
    "order of the axes says.",
    wrong=_HERE,
    fixed=None,
    no_fix="the issue is open",
)
def two_axes_that_shard_a_dimension_unevenly_give_each_rank_its_own_rows() -> Answer:
    seen = run_gloo(_strided, 2)
    right = [[0.0, 1.0, 3.0, 4.0], [2.0]]
    return Answer(seen == right, f"ranks hold {seen} of {right}")


def _item(rank: int) -> float:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh("cpu", (2,))
    return DTensor.from_local(torch.tensor([1.0 + rank]), mesh, [Partial()]).sum().item()


@peer_case(
    "pytorch/pytorch#166638",
    went_wrong="A number that is the sum over ranks was read as this rank's addend alone.",
    wrong=_HERE,
    fixed=None,
    no_fix="the issue is open",
)
def a_norm_that_is_read_is_the_norm_over_all_ranks() -> Answer:
    seen = run_gloo(_item, 2)
    return Answer(seen == [3.0, 3.0], f"ranks read {seen} of the sum 3")


@peer_case(
    "pytorch/pytorch#162591",
    went_wrong="A chain of schedules that resumes at a step began with another learning rate than "
    "the chain had at that step.",
    wrong=_HERE,
    fixed=None,
    no_fix="the issue is open",
)
def a_resumed_schedule_goes_on_with_its_learning_rate() -> Answer:
    import torch
    from torch.optim.lr_scheduler import ConstantLR, ExponentialLR, SequentialLR

    def made(last: int) -> tuple[torch.optim.Optimizer, SequentialLR]:
        group = {"params": [torch.nn.Parameter(torch.zeros(1))], "initial_lr": 1.0}
        optimizer = torch.optim.SGD([group], lr=1.0)
        parts = [ConstantLR(optimizer, factor=0.1, total_iters=20), ExponentialLR(optimizer, 0.9)]
        return optimizer, SequentialLR(optimizer, parts, milestones=[3], last_epoch=last)

    first, schedule = made(-1)
    for _ in range(5):
        schedule.step()
    resumed, _ = made(5)
    rates = [optimizer.param_groups[0]["lr"] for optimizer in (first, resumed)]
    return Answer(
        abs(rates[0] - rates[1]) < 1e-9, f"learning rate {rates[0]:.4g}, resumed {rates[1]:.4g}"
    )
