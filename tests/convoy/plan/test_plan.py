"""The planner's parts: clusters, shapes, memory, step time, and the table of published runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w

from convoy.plan import MEMORY_ERROR, validate
from convoy.plan.hardware import load_cluster, shipped_clusters
from convoy.plan.memory import kept_elements, loss_bytes, memory, rank_parameters
from convoy.plan.shape import ModelShape
from convoy.plan.step_time import least_seconds, step_time
from convoy.plan.work import Program, Work
from moe import MoEConfig
from parallel import PipelineSchedule
from parallel.layout import Topology
from pretrain.errors import InputError
from pretrain.model import ModelConfig, forward_flops, meta_decoder
from pretrain.parallelize import bubble
from pretrain.parallelize.decoder import decoder_layouts
from pretrain.parallelize.stages import stage_layers

ROOT = Path(__file__).parents[3]
TINY = ModelConfig(vocab_size=2048, d_model=256, num_layers=4, num_heads=4, num_kv_heads=4)
TINY_MOE = MoEConfig(d_model=256, d_ff=512, num_experts=8, top_k=2)
LATENT = ModelConfig(
    vocab_size=1024, d_model=64, num_layers=7, num_heads=4, num_kv_heads=4, qk_norm="none",
    kv_lora_rank=16, q_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
    d_ff=128, first_k_dense=2,
)  # fmt: skip
LATENT_MOE = MoEConfig(
    d_model=64, d_ff=32, num_experts=8, top_k=2, num_shared_experts=2, shared_expert_gate=True
)
GROUPED = ModelConfig(
    vocab_size=512, d_model=64, num_layers=5, num_heads=8, num_kv_heads=2, d_ff=96, head_dim=16
)
FEATURES = GROUPED.model_copy(
    update={"attention_bias": "all", "qk_rope_head_dim": 8, "norm_after": True}
)
MTP = LATENT.model_copy(update={"num_mtp_layers": 2})
MODELS = [(TINY, TINY_MOE), (LATENT, LATENT_MOE), (MTP, LATENT_MOE), (FEATURES, LATENT_MOE),
          (GROUPED, None)]  # fmt: skip


# ------------------------------------------------------------------------------------------------
# Clusters.


def test_clusters_come_with_convoy():
    names = shipped_clusters()
    assert names == ["a100", "b200", "cpu", "gb200", "h100", "h200", "h800", "mi300x"]
    for name in names:
        cluster = load_cluster(name)
        dtype = next(iter(cluster.chip.peak_teraflops))
        assert cluster.chip.memory_bytes > 2**33
        # A large square GEMM comes near the best share that was measured, a small one does not.
        peak = cluster.chip.peak(dtype)
        large, small = (2 * n**3 / cluster.chip.gemm_seconds(n, n, n, dtype) for n in (16384, 64))
        best = cluster.chip.gemm.best[dtype] * cluster.chip.sustained * peak
        assert 0.9 * best < large <= best
        assert small < 0.9 * best


def test_a_gemm_waits_for_its_last_wave_and_for_memory():
    chip = load_cluster("h100").chip
    units, tile = chip.gemm.units, chip.gemm.tile
    full = chip.gemm_seconds(8 * tile, tile * units / 4, 4096, "bfloat16")
    one_more = chip.gemm_seconds(8 * tile, tile * (units / 4 + 1), 4096, "bfloat16")
    assert one_more / full == pytest.approx(1.5, rel=0.1)  # three waves for two
    # One row: the matrix is read once, and computing hardly counts.
    row = chip.gemm_seconds(1, 65536, 8192, "bfloat16")
    assert row > 65536 * 8192 * 2 / (chip.memory_gigabytes_per_second * 1e9)
    assert chip.gemm_seconds(0, 8, 8, "bfloat16") == 0


def cluster_file(folder: Path, change) -> str:
    data = load_cluster("h100").model_dump()
    change(data)
    file = folder / "mine.toml"
    file.write_text(tomli_w.dumps(data))
    return str(file)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["chip"].pop("peak_teraflops"), "chip.peak_teraflops: required"),
        (lambda d: d["chip"]["peak_teraflops"].clear(), "chip.peak_teraflops: needs a dtype"),
        (lambda d: d["chip"]["gemm"]["best"].pop("bfloat16"), "chip.gemm.best.bfloat16: required"),
        (lambda d: d["inter_node"].pop("gigabytes_per_second"),
         "inter_node.gigabytes_per_second: required"),
        (lambda d: d.update(nodes=0), "nodes (0): Input should be greater than or equal to 1"),
        (lambda d: d.update(gpus_per_nod=8), "gpus_per_nod: no such field"),
        (lambda d: d["chip"].update(reserved_gib=80.0), "chip.reserved_gib (80) must be less"),
    ],
)  # fmt: skip
def test_a_cluster_file_that_cannot_be_is_one_line(tmp_path, change, said):
    file = cluster_file(tmp_path, change)
    with pytest.raises(InputError) as error:
        load_cluster(file)
    assert str(error.value).startswith(f"cluster {file}: {said}")
    assert "\n" not in str(error.value)


def test_an_unknown_cluster_names_those_that_there_are():
    with pytest.raises(InputError, match=r"--cluster \(h1000\) must be a file, or one of a100, b2"):
        load_cluster("h1000")
    with pytest.raises(InputError, match="has float32, and not bfloat16"):
        load_cluster("cpu").chip.peak("bfloat16")


# ------------------------------------------------------------------------------------------------
# Shapes, against the model itself.


@pytest.mark.parametrize(("model", "moe"), MODELS)
def test_parameters_and_operations_are_those_of_the_decoder(model, moe):
    shape = ModelShape.of(model, moe)
    assert shape.parameters == sum(p.numel() for p in meta_decoder(model, moe).parameters())
    for causal in (True, False):
        flops = forward_flops(model, moe, 128, causal).training
        assert shape.token_flops(128, causal) == pytest.approx(flops)


SCHEDULES = [("1f1b", 1), ("1f1b", 2), ("zbv", 2)]
HEAVY = TINY.model_copy(update={"vocab_size": 500_000})  # a head that costs more than all layers


@pytest.mark.parametrize(("model", "moe"), [*MODELS, (HEAVY, TINY_MOE)])
@pytest.mark.parametrize(("schedule", "stages_per_rank"), SCHEDULES)
@pytest.mark.parametrize("narrow", ["", "dense", "experts"])
def test_stages_have_the_layers_of_a_run(model, moe, schedule, stages_per_rank, narrow):
    if moe is not None and narrow == "experts":
        moe = moe.model_copy(update={"gemm": "float8"})
    program = Program(dense_float8=narrow == "dense", experts_float8=narrow == "experts")
    for pp in range(2, model.num_layers // stages_per_rank + 1):
        work = Work(ModelShape.of(model, moe), Topology(pp=pp), 128, 8, 1, schedule=schedule,
                    stages_per_rank=stages_per_rank, program=program)  # fmt: skip
        taken = stage_layers(
            model, moe, seq_len=128, pp=pp, stages_per_rank=stages_per_rank,
            schedule=PipelineSchedule(schedule), dense_float8=narrow == "dense",
        )  # fmt: skip
        assert work.stages == taken
        seconds = step_time(work, load_cluster("h100")).total
        assert seconds >= least_seconds(work, load_cluster("h100"))
        assert memory(work, load_cluster("h100").chip).total > 0


def test_a_head_in_bfloat16_costs_twice_as_much_beside_layers_in_float8():
    wide = TINY.model_copy(update={"vocab_size": 8192})

    def last(program):
        work = Work(ModelShape.of(wide, TINY_MOE), Topology(pp=2), 128, 8, 1, program=program)
        return len(work.stages[-1])

    assert last(Program(dtype="float8")) < last(Program())


LAYOUTS = [
    Topology(), Topology(dp_shard=4, ep=2), Topology(dp_shard=2, tp=2, ep=4),
    Topology(pp=2, dp_replicate=2, dp_shard=2, cp=2, ep=2),
]  # fmt: skip


@pytest.mark.parametrize("topology", LAYOUTS, ids=Topology.describe)
@pytest.mark.parametrize(("model", "moe"), MODELS[:4])
def test_a_rank_stores_what_the_layouts_of_a_run_say(model, moe, topology):
    work = Work(ModelShape.of(model, moe), topology, 128, 8, 1)
    meta = meta_decoder(model, moe)
    layouts = decoder_layouts(meta, work.stages, topology, PipelineSchedule.ONE_F_ONE_B)
    per_place = topology.world // topology.pp
    names = {name for name, _ in meta.named_parameters()}
    for place in range(topology.pp):
        ranks = range(place * per_place, (place + 1) * per_place)
        held = [
            sum(
                _size(box) for name in names for box in layouts[name].boxes(rank)
            )
            for rank in ranks
        ]  # fmt: skip
        mean = sum(held) / len(held)
        assert rank_parameters(work, place).stored == pytest.approx(mean)


def _size(box) -> int:
    size = 1
    for start, stop in box:
        size *= stop - start
    return size


# ------------------------------------------------------------------------------------------------
# Memory, against what bench/memory.py measured.


def measured(case: str, metric: str) -> dict[str, float]:
    rows = json.loads((ROOT / "bench/results/memory.json").read_text())["rows"]
    return {r["subject"]: r["value"] for r in rows if (r["case"], r["metric"]) == (case, metric)}


WAYS = {
    "none": ("none", 1), "selective": ("selective", 1), "full, every 2nd": ("full", 2),
    "full": ("full", 1),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_activations_are_those_measured(way):
    # bench/memory.py's model and batch; it holds the logits and what the last norm keeps too.
    how, every = WAYS[way]
    work = Work(
        ModelShape.of(TINY, TINY_MOE), Topology(), 512, 8, 8, program=Program(dtype="float32"),
        recompute=how, recompute_layer_freq=every,
    )  # fmt: skip
    kinds = work.kinds_of(0).items()
    kept = sum(count * kept_elements(work, *kind, "cpu") for kind, count in kinds)
    kept += 8 * 512 * (2048 + 2 * 256)
    assert 4 * kept == pytest.approx(measured("activations", "held_bytes")[way], rel=0.03)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_peak_of_a_rank_is_that_measured(zero):
    model = ModelConfig(vocab_size=512, d_model=512, num_layers=8, num_heads=8, num_kv_heads=8)
    moe = MoEConfig(d_model=512, d_ff=512, num_experts=16, top_k=2)
    work = Work(
        ModelShape.of(model, moe), Topology(dp_shard=2), 64, 4, 1, zero_stage=zero,
        program=Program(dtype="float32"),
    )  # fmt: skip
    planned = memory(work, load_cluster("cpu").chip).total
    peak = measured("state", "peak_bytes")[f"zero {zero}"]
    assert planned == pytest.approx(peak, rel=MEMORY_ERROR)


def make(topology=Topology(), **options) -> Work:  # noqa: B008
    options = {"micro_batch_size": 1} | options
    return Work(ModelShape.of(TINY, TINY_MOE), topology, 512, 64, **options)


def test_each_kind_of_recomputation_takes_less_memory():
    chip = load_cluster("h100").chip
    sizes = [memory(make(recompute=how), chip).activations for how in ("none", "selective", "full")]
    assert sizes[0] > sizes[1] > sizes[2]
    by_zero = [memory(make(Topology(dp_shard=8), zero_stage=z), chip).total for z in (1, 2, 3)]
    assert by_zero[0] > by_zero[1] > by_zero[2]


def test_multi_token_prediction_takes_memory_and_time_on_the_last_stage():
    cluster = load_cluster("h100")
    deep = TINY.model_copy(update={"num_mtp_layers": 1})

    def of(model, topology):
        work = Work(ModelShape.of(model, TINY_MOE), topology, 512, 64, 1)
        return memory(work, cluster.chip), step_time(work, cluster), work

    for topology in (Topology(), Topology(pp=2), Topology(dp_shard=4, tp=2, ep=2)):
        (less, fast, before), (more, slow, work) = of(TINY, topology), of(deep, topology)
        assert loss_bytes(before) < loss_bytes(work) < 2 * loss_bytes(before)
        assert more.total > less.total
        assert slow.total > fast.total
        assert least_seconds(before, cluster) < least_seconds(work, cluster) <= slow.total
        assert 4 in work.layers_of(topology.pp - 1)
    assert slow.stages == fast.stages == 0
    assert of(deep, Topology(pp=2))[1].stages > of(TINY, Topology(pp=2))[1].stages


# ------------------------------------------------------------------------------------------------
# Step time.


def test_collectives_by_group_and_link():
    cluster = load_cluster("h100")
    inner = 450e9 * cluster.intra_node.efficiency
    outer = 50e9 * cluster.inter_node.efficiency
    big = 1e10
    assert cluster.gather_seconds(big, 1, 1) == 0
    assert cluster.gather_seconds(big, 8, 1) == pytest.approx(big * 7 / 8 / inner, rel=0.01)
    # A rank of each node: one network port. Eight of each: eight ports, as fast as the link.
    assert cluster.gather_seconds(big, 8, 8) == pytest.approx(big * 7 / 8 / outer, rel=0.01)
    assert cluster.gather_seconds(big, 64, 1) == pytest.approx(
        big * 63 / 64 / min(inner, 8 * outer), rel=0.01
    )
    # Few bytes: latency, which grows with the group.
    assert cluster.gather_seconds(1, 1024, 1) > cluster.gather_seconds(1, 8, 1) > 4e-6
    far = cluster.exchange_seconds(big, 64)
    assert far == pytest.approx(big * 56 / 64 / (50e9 * 0.8), rel=0.01)
    assert cluster.exchange_seconds(big, 64, 0.5) < far


def test_the_bubble_is_that_of_the_schedules():
    from convoy.plan.step_time import bubble_share

    for name, v in (("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("zbv", 2), ("dualpipev", 2)):
        work = make(Topology(pp=4), schedule=name, stages_per_rank=v)
        assert bubble_share(work) == bubble(4, v, work.micro_batches, PipelineSchedule(name))
    assert bubble_share(make()) == 0


def test_parts_of_a_step_add_up_and_go_the_right_way():
    cluster = load_cluster("h100")

    def seconds(*args, **options):
        return step_time(make(*args, **options), cluster)

    alone = seconds()
    assert alone.total == pytest.approx(sum(alone.as_dict().values()))
    quiet = ("tensor_parallel", "context_parallel", "expert_parallel", "stages", "bubble")
    assert all(getattr(alone, name) == 0 for name in quiet)
    assert seconds(recompute="full").recompute > seconds(recompute="selective").recompute > 0
    assert seconds(Topology(dp_shard=2, ep=2)).expert_parallel > 0
    assert seconds(Topology(tp=2)).tensor_parallel > 0
    assert seconds(Topology(cp=2)).context_parallel > 0
    assert seconds(Topology(pp=2)).bubble > 0
    pair = Topology(dp_shard=2, ep=2)
    large = {"micro_batch_size": 16}
    assert seconds(pair, imbalance=1.5, **large).imbalance > 0
    assert seconds(pair, imbalance=1.0, **large).imbalance == 0
    assert seconds(pair, imbalance=1.5, capacity_factor=1.0, **large).imbalance == 0
    # A rank with all experts computes its own tokens, whoever has chosen which.
    assert seconds(Topology(dp_shard=2), imbalance=1.5, **large).imbalance == 0
    # What overlaps counts less.
    wide = Topology(dp_shard=64)
    open_ = seconds(wide, program=Program(hides_data_parallel=False))
    assert open_.data_parallel > seconds(wide).data_parallel >= 0
    both = Topology(dp_shard=8, ep=8)
    assert (
        seconds(both, program=Program(hides_dispatch=1.0)).expert_parallel
        < seconds(both).expert_parallel
    )


def test_computation_hides_what_is_sent_once_a_step_and_once_a_micro_batch_once():
    # With one micro-batch, ZeRO-1 and ZeRO-2 send equal bytes at equal times.
    cluster = load_cluster("h100")

    def exposed(zero, sequences):
        work = make(Topology(dp_shard=512), zero_stage=zero)
        work = work.with_(global_batch_size=sequences)
        return step_time(work, cluster).data_parallel

    assert 0 < exposed(1, 512) == pytest.approx(exposed(2, 512))
    assert exposed(1, 2048) < exposed(2, 2048) < exposed(3, 2048)


def test_zero_3_gathers_layers_twice_and_embedding_and_head_once():
    cluster = load_cluster("h100")
    open_ = Program(hides_data_parallel=False)

    def sent(zero, vocab):
        shape = ModelShape.of(LATENT.model_copy(update={"vocab_size": vocab}), LATENT_MOE)
        work = Work(shape, Topology(dp_shard=64), 512, 64, 1, program=open_, zero_stage=zero)
        return step_time(work, cluster).data_parallel

    # Of one micro-batch: a larger vocabulary costs both stages as much, and each layer more.
    grows = [sent(zero, 64_000) - sent(zero, 32_000) for zero in (2, 3)]
    assert 0 < grows[0] == pytest.approx(grows[1])
    assert sent(3, 32_000) > sent(2, 32_000)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_no_layout_is_faster_than_its_bound(zero):
    # The search leaves out what its bound rules out; the bound is also not far below.
    cluster, ratios = load_cluster("h100"), []
    for topology in [*LAYOUTS, Topology(pp=4, dp_shard=8, ep=8), Topology(pp=3, tp=2)]:
        for name, v in (("1f1b", 1), ("zbv", 2), ("dualpipev", 2)):
            for mb in (1, 8):
                for how in ("none", "full"):
                    work = Work(
                        ModelShape.of(LATENT, LATENT_MOE), topology, 512, 64, mb, schedule=name,
                        stages_per_rank=v, zero_stage=zero, recompute=how, imbalance=1.2,
                    )  # fmt: skip
                    if topology.pp * v > LATENT.num_layers or topology.pp < v:
                        continue
                    least, taken = least_seconds(work, cluster), step_time(work, cluster).total
                    assert 0 < least <= taken * (1 + 1e-9), work
                    ratios.append(least / taken)
    assert len(ratios) == 40
    assert max(ratios) > 0.7


# ------------------------------------------------------------------------------------------------
# Published runs.


def test_published_runs_keep_the_bounds():
    rows = validate.compare()
    assert validate.missed_bounds(rows) == []
    assert {row.group.kind for row in rows} == {"dense", "moe"}
    assert len(rows) == 24
    # Few rows chose the constants; the rest were left out, and keep the bounds by themselves.
    left_out = [row for row in rows if not row.run.tuned]
    assert len(left_out) == 21
    assert validate.missed_bounds(left_out) == []


def test_a_missed_bound_is_told():
    rows = [replace(row, planned=row.planned * 1.5) for row in validate.compare()]
    missed = validate.missed_bounds(rows)
    assert [line.split(" error")[0] for line in missed] == [
        "dense rows: the median", "dense rows: the worst", "moe rows: the median",
    ]  # fmt: skip
    assert missed[0].endswith("must be at most 10%")


def test_published_numbers_are_consistent():
    groups = {group.name: group for group in validate.published_groups()}
    megatron = groups["Megatron-LM 2021"]
    for run in megatron.run:
        work = megatron.work_of(run)
        # The name of a row is its size, and its batch is whole micro-batches.
        size = {"B": 1e9, "T": 1e12}[run.name[-1]] * float(run.name[:-1])
        assert work.shape.parameters == pytest.approx(size, rel=0.06), run.name
        assert work.global_batch_size % (work.replicas * work.micro_batch_size) == 0
    one = next(run for run in megatron.run if run.name == "1T")
    flops = validate.step_flops(megatron.work_of(one), "hardware")
    assert flops / (3072 * one.teraflops * 1e12) == pytest.approx(102.6, rel=0.01)
    v3 = groups["DeepSeek-V3"]
    work = v3.work_of(v3.run[0])
    # The run trained multi-token prediction, and its TFLOP/s do not count it.
    main = replace(work.shape, num_mtp_layers=0)
    assert work.shape.token_flops(4096) == pytest.approx(260.6e9, rel=0.001)
    assert main.token_flops(4096) == pytest.approx(250.4e9, rel=0.001)
    assert validate.step_flops(work, "causal") == 15360 * 4096 * main.token_flops(4096)
    tokens = work.global_batch_size * work.seq_len
    assert tokens * 250.4e9 / (19.926 * 2048) / 1e12 == pytest.approx(v3.run[0].teraflops, rel=0.01)
    # Tokens a second of one GPU, as published beside the TFLOP/s.
    nemo = groups["NeMo Automodel"]
    for run, tokens in zip(nemo.run, (865, 1002, 12040), strict=True):
        flops = nemo.work_of(run).shape.token_flops(4096)
        assert tokens * flops / 1e12 == pytest.approx(run.teraflops, rel=0.01), run.name
    # MFU and batch of the rows of strong scaling (table 4), and the layout of table 3 at each size.
    folding = groups["MoE parallel folding"]
    scaling = [run for run in folding.run if "batch 1,024" in run.name]
    for run, gpus, mfu in zip(
        scaling, (128, 256, 512, 1024), (0.522, 0.507, 0.489, 0.449), strict=True
    ):
        work = folding.work_of(run)
        assert work.global_batch_size == 1024
        assert (work.topology.tp, work.topology.ep, work.topology.pp) == (2, 8, 8)
        assert work.topology.world == gpus
        assert run.teraflops / folding.peak_teraflops == pytest.approx(mfu, rel=1e-3)
