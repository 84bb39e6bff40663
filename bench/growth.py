"""How cost grows with experts, layers, ranks and accelerators.

    OMP_NUM_THREADS=1 python -m bench.growth [--quick] [--json FILE] [--samples N] [--only TEXT]

- ``experts``: forward and backward of a MoE layer at equal active FLOPs, with 8 to 512 experts; the
  limit is the layer with 8.
- ``layers``: a training step of a decoder of 2 to 16 layers; the limit is a step of 2 layers times
  the layers over 2.
- ``barrier``: the exchange of the step barrier on 1 to 8 real ranks, which a step has once; the
  limit is a second of step, of which the exchange may take a hundredth.
- ``answer``: the answer to a scrape, for a model of 8 to 128 layers on 256 ranks; linear as layers.
- ``planning``: the search of a layout for 64 to 65,536 accelerators; the limit is one second.

A ratio of 1 is growth as the limit says; below 1 the cost grows faster.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry, generate_latest

from bench.harness import Row, arguments, finish
from bench.recipe_runs import RECIPE, ROOT
from bench.scaling import on_ranks
from bench.scrapes import interval
from convoy.plan import load_cluster, search_layouts
from moe import MoEConfig, MoELayer
from parallel import Topology
from pretrain.model import Decoder, ModelConfig
from pretrain.observe import Metrics
from pretrain.parallelize import LocalBatch, forward_backward
from pretrain.parts.step import Report
from pretrain.runtime import keep_freed_memory
from pretrain.spec import load_spec
from pretrain.train.barrier import exchange

EXPERTS = (8, 32, 128, 512)
LAYERS = (2, 4, 8, 16)
RANKS = (1, 2, 4, 8)
ANSWER_LAYERS = (8, 32, 128)
ACCELERATORS = (64, 1024, 16_384, 65_536)
PLANNED = ROOT / "tools/recipes/qwen3-235b-a22b.toml"
_T = 2048
_EXCHANGES = 200


def _in_turn(subjects: dict[str, Callable[[], object]], samples: int) -> dict[str, list[float]]:
    """Samples of each subject, taken in turns."""
    found: dict[str, list[float]] = {name: [] for name in subjects}
    for act in subjects.values():
        act()
    for _ in range(samples):
        for name, act in subjects.items():
            began = time.perf_counter()
            act()
            found[name].append(time.perf_counter() - began)
    return found


def experts(samples: int) -> Iterator[Row]:
    """A layer with more and more experts."""

    def both(layer: MoELayer, x_TD: torch.Tensor) -> None:
        layer(x_TD)[0].square().sum().backward()
        layer.zero_grad()

    x_TD = torch.randn(_T, 256)
    layers = {
        str(count): MoELayer(MoEConfig(d_model=256, d_ff=256, num_experts=count, top_k=4))
        for count in EXPERTS
    }
    acts: dict[str, Callable[[], object]] = {
        name: partial(both, layer, x_TD) for name, layer in layers.items()
    }
    found = _in_turn(acts, samples)
    base = statistics.median(found[str(EXPERTS[0])])
    for name, seconds in found.items():
        middle = statistics.median(seconds)
        yield Row("experts", f"{name} experts", "forward_backward_seconds", middle, "s",
                  base / middle, seconds)  # fmt: skip


def layers(samples: int) -> Iterator[Row]:
    """A step of deeper and deeper models."""
    sizes: Any = {"vocab_size": 512, "d_model": 128, "num_heads": 4, "num_kv_heads": 2}
    moe = MoEConfig(d_model=128, d_ff=128, num_experts=8, top_k=2)
    batch = torch.randint(0, 512, (4, 257))
    models = {str(count): Decoder(ModelConfig(num_layers=count, **sizes), moe) for count in LAYERS}

    def step(model: Decoder) -> None:
        forward_backward(model, [batch], 1024, device=torch.device("cpu"), local_batch=LocalBatch())
        model.zero_grad()

    found = _in_turn({name: partial(step, model) for name, model in models.items()}, samples)
    base = statistics.median(found[str(LAYERS[0])]) / LAYERS[0]
    for name, seconds in found.items():
        middle = statistics.median(seconds)
        yield Row("layers", f"{name} layers", "step_seconds", middle, "s",
                  base * int(name) / middle, seconds)  # fmt: skip


def _exchanges(rank: int) -> list[float]:
    report = Report(*[1.0] * 11)
    found = []
    for _ in range(_EXCHANGES):
        began = time.perf_counter()
        exchange(report, torch.device("cpu"))
        found.append(time.perf_counter() - began)
    return found


def barrier(samples: int) -> Iterator[Row]:
    """The exchange of the step barrier; the cores have at most two ranks at once."""
    for ranks in RANKS:
        seconds = max(map(statistics.median, on_ranks(_exchanges, ranks)))
        yield Row("barrier", f"{ranks} ranks", "exchange_seconds", seconds, "s",
                  min(1.0, 0.01 / seconds), [seconds])  # fmt: skip


def answers(samples: int) -> Iterator[Row]:
    """The answer to a scrape."""
    base = 0.0
    for count in ANSWER_LAYERS:
        registry = CollectorRegistry()
        metrics = Metrics(registry, load_spec(RECIPE), Topology(), "0")
        metrics(interval(count, 256))
        (seconds,) = _in_turn({"": partial(generate_latest, registry)}, samples).values()
        middle = statistics.median(seconds)
        base = base or middle / count
        yield Row("answer", f"{count} layers, 256 ranks", "thread_seconds", middle, "s",
                  base * count / middle, seconds)  # fmt: skip


def planning(samples: int) -> Iterator[Row]:
    """The search of a layout for more and more accelerators."""
    spec, cluster = load_spec(PLANNED), load_cluster("h100")
    for count in ACCELERATORS:
        batch = max(spec.batch.global_batch_size, count)
        larger = load_spec(PLANNED, [f"batch.global_batch_size={batch}"])
        search = partial(search_layouts, larger, count, cluster)
        (seconds,) = _in_turn({"": search}, min(samples, 3)).values()
        middle = statistics.median(seconds)
        yield Row("planning", f"{count:,} accelerators", "search_seconds", middle, "s",
                  min(1.0, 1 / middle), seconds)  # fmt: skip


CASES: dict[str, Callable[[int], Iterator[Row]]] = {
    "experts": experts, "layers": layers, "barrier": barrier, "answer": answers,
    "planning": planning,
}  # fmt: skip


def plot(rows: Sequence[Row], file: Path) -> None:
    """A panel for each case, both axes logarithmic."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    from convoy.report.figures import COLORS, STYLE

    cases = list(dict.fromkeys(row.case for row in rows))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(3.2 * len(cases), 3), layout="constrained")
        FigureCanvasSVG(figure)
        for axes, case in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases, strict=True):
            here = [row for row in rows if row.case == case]
            counts = [int(row.subject.split()[0].replace(",", "")) for row in here]
            axes.loglog(counts, [1e3 * row.value for row in here], "o-", color=COLORS[0])
            axes.set_title(case)
            axes.set_xlabel(here[0].subject.split(maxsplit=1)[1])
            axes.set_ylabel("milliseconds")
        figure.savefig(file, format="svg", metadata={"Date": None})


def main() -> None:
    """Measure, print, and write JSON and the picture beside it where asked."""
    args = arguments(__doc__ or "")
    keep_freed_memory()  # as a run does
    samples = 2 if args.quick else args.samples
    rows = [row for name, case in CASES.items() if args.only in name for row in case(samples)]
    finish("growth", rows, ["torch", "prometheus-client"], args.json)
    if args.json is not None:
        plot(rows, args.json.with_suffix(".svg"))


if __name__ == "__main__":
    main()
