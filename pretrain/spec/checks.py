"""Rules between the sections of a spec, one function for each family of rules.

Every function raises ValueError: one line that names the fields, their values and the rule.
"""

from __future__ import annotations

from pretrain.model import MTPConfig
from pretrain.spec.exact import check_exact
from pretrain.spec.sections import Sections


def check_moe(spec: Sections) -> None:
    """Experts against the model, the expert-parallel degree and the batch."""
    model, moe, ep = spec.model, spec.moe, spec.parallel.ep
    if model.d_ff == 0 and (moe is None or model.first_k_dense):
        raise ValueError(
            "model.d_ff (0) must be at least 1 where a layer is dense: "
            "model.first_k_dense is above 0 or there is no [moe] section"
        )
    if moe is None:
        if ep > 1:
            raise ValueError(f"parallel.ep ({ep}) must be 1 where there is no [moe] section")
        return
    if moe.num_experts < ep:
        raise ValueError(f"moe.num_experts ({moe.num_experts}) must be at least parallel.ep ({ep})")
    if moe.num_experts % ep:
        raise ValueError(
            f"moe.num_experts ({moe.num_experts}) must be a multiple of parallel.ep ({ep})"
        )
    recompute = spec.parallel.memory.recompute
    if moe.recompute_experts and recompute != "none":
        # FSDP's hooks miss the inner recomputation: the experts were left without gradients.
        raise ValueError(
            f"moe.recompute_experts (true) must be false with parallel.memory.recompute "
            f"({recompute}): a recomputation within a recomputation loses gradients"
        )
    if moe.capacity.policy == "straggler_aware" and ep == 1 and not spec.elastic.enabled:
        raise ValueError(
            "parallel.ep (1) must be at least 2 with moe.capacity.policy (straggler_aware): "
            "ranks that hold all experts have no work to pass on"
        )


def check_pipeline(spec: Sections) -> None:
    """Pipeline stages against the model."""
    pp, stages_per_rank = spec.parallel.pp, spec.parallel.pipeline.stages_per_rank
    if pp * stages_per_rank > spec.model.num_layers:
        raise ValueError(
            f"model.num_layers ({spec.model.num_layers}) must be at least parallel.pp x "
            f"parallel.pipeline.stages_per_rank ({pp} x {stages_per_rank} stages)"
        )
    if pp > 1 and spec.model.tie_embeddings:
        raise ValueError(
            f"parallel.pp ({pp}) must be 1 with model.tie_embeddings (true): the first stage "
            f"and the last would share a matrix"
        )


def check_compile(spec: Sections) -> None:
    """What torch.compile does not go with."""
    if spec.train.compile and spec.data.document_mask:
        raise ValueError(
            "train.compile (true) must be false with data.document_mask (true): where "
            "documents end changes with every batch"
        )
    if spec.train.compile and spec.parallel.memory.recompute == "selective":
        raise ValueError(
            "train.compile (true) must be false with parallel.memory.recompute (selective): "
            "operations inside a compiled region cannot be selected"
        )


def check_sequences(spec: Sections) -> None:
    """The length of a sequence against the corpus, the model and the ranks that share sequences."""
    cp, tp, seq_len = spec.parallel.cp, spec.parallel.tp, spec.data.seq_len
    if cp > 1 and seq_len % (2 * cp * tp):
        raise ValueError(
            f"data.seq_len ({seq_len}) must be a multiple of 2 x parallel.cp x parallel.tp "
            f"(2 x {cp} x {tp}): a rank takes a piece of a sequence's first half and one "
            f"of its second"
        )
    if seq_len % tp:
        raise ValueError(
            f"data.seq_len ({seq_len}) must be a multiple of parallel.tp ({tp}): between "
            f"GEMMs every rank has a part of the sequence"
        )
    if 0 < spec.model.max_seq_len < seq_len:
        raise ValueError(
            f"data.seq_len ({seq_len}) must be at most model.max_seq_len ({spec.model.max_seq_len})"
        )
    if spec.model.num_mtp_layers >= seq_len:
        raise ValueError(
            f"model.num_mtp_layers ({spec.model.num_mtp_layers}) must be less than data.seq_len "
            f"({seq_len}): the last of these layers would have no target"
        )
    if not spec.model.num_mtp_layers and spec.mtp != MTPConfig():
        raise ValueError(
            f"mtp.loss_weight ({spec.mtp.loss_weight}) and mtp.stages must be left out where "
            f"model.num_mtp_layers is 0: no layer predicts later tokens"
        )
    if seq_len >= spec.data.shard_tokens:
        raise ValueError(
            f"data.seq_len ({seq_len}) must be less than data.shard_tokens "
            f"({spec.data.shard_tokens}): no sequence crosses from one shard into the next"
        )


def check_tensor_parallel(spec: Sections) -> None:
    """Sizes of the model against the tensor-parallel degree."""
    tp, model = spec.parallel.tp, spec.model
    if tp == 1 or spec.train.exact:  # then no matrix is cut
        return
    for field in ("num_heads", "num_kv_heads", "d_ff", "vocab_size"):
        if getattr(model, field) % tp:
            raise ValueError(
                f"model.{field} ({getattr(model, field)}) must be a multiple of parallel.tp ({tp})"
            )
    for field, value, why in (
        ("tie_embeddings", model.tie_embeddings, "an embedding that is the output matrix too"),
        ("qk_norm", model.qk_norm == "all_heads" and model.qk_norm, "a norm over all heads"),
    ):
        if value:
            raise ValueError(
                f"parallel.tp ({tp}) must be 1 with model.{field} ({value}): {why} is not cut; "
                f"parallel.dp_shard, cp and ep are for such a model"
            )


def check_float8(spec: Sections) -> None:
    """Products in float8 against the model, torch.compile and the tensor-parallel degree."""
    precision, moe = spec.precision, spec.moe
    if moe is None and precision.experts == "float8":
        raise ValueError(
            "precision.experts (float8) must be compute where there is no [moe] section"
        )
    if moe is not None and moe.dispatch_dtype == "float8" and precision.compute == "float16":
        raise ValueError(
            "moe.dispatch_dtype (float8) must be compute with precision.compute (float16), which "
            "does not hold all that float8 and its scales can say"
        )
    if precision.dense != "float8":
        return
    if spec.train.compile:
        raise ValueError(
            "train.compile (true) must be false with precision.dense (float8): the counts of "
            "underflow are not traced"
        )
    tp, model = spec.parallel.tp, spec.model
    if tp == 1:
        return
    q, kv = model.num_heads * model.qk_head_dim, model.num_kv_heads * model.qk_head_dim
    sizes = {"d_ff": model.d_ff, "num_heads x head_dim": q, "num_kv_heads x head_dim": kv}
    if model.latent:
        up = model.num_heads * (model.qk_nope_head_dim + model.v_head_dim)
        sizes |= {
            "num_heads x v_head_dim": model.num_heads * model.v_head_dim,
            "num_heads x (qk_nope_head_dim + v_head_dim)": up,
        }
        del sizes["num_kv_heads x head_dim"]
    for field, size in sizes.items():
        if size % (128 * tp):
            raise ValueError(
                f"model.{field} ({size}) must be a multiple of 128 x parallel.tp (128 x {tp}) with "
                f"precision.dense (float8): no block of 128 x 128 weights is cut over ranks"
            )


def check_schedule(spec: Sections) -> None:
    """The learning-rate schedule and the checkpoints against the length of the run."""
    schedule, steps = spec.schedule, spec.train.steps
    if schedule.warmup_steps + schedule.decay_steps > steps:
        raise ValueError(
            f"schedule.warmup_steps + decay_steps ({schedule.warmup_steps} + "
            f"{schedule.decay_steps}) must be at most train.steps ({steps})"
        )


def check_checkpoint(spec: Sections) -> None:
    """Retention against evaluation."""
    best = spec.checkpoint.retention.keep_best
    if best and not spec.eval.interval_steps:
        raise ValueError(
            f"checkpoint.retention.keep_best ({best}) must be 0 without eval.interval_steps: "
            f"nothing tells which checkpoint is best"
        )


def check_faults(spec: Sections) -> None:
    """Faults on purpose against the length of the run and each other."""
    known: set[str] = set()
    for fault in spec.inject:
        if fault.step > spec.train.steps:
            raise ValueError(
                f"inject.step ({fault.step}) of {fault.kind} must be at most train.steps "
                f"({spec.train.steps})"
            )
        if fault.name in known:
            raise ValueError(
                f"inject must have each fault once: there are two of {fault.name}; change one of "
                f"the two in step or rank"
            )
        known.add(fault.name)


def check_stragglers(spec: Sections) -> None:
    """The replacement of slow ranks against elastic runs."""
    if spec.stragglers.replace and not spec.elastic.enabled:
        raise ValueError(
            "stragglers.replace (true) must be false with elastic.enabled (false): the run could "
            "not go on without the machine"
        )


def check_verify(spec: Sections) -> None:
    """Retention against the steps between two checks of gradients."""
    every, retention = spec.verify.gradients_interval_steps, spec.checkpoint.retention
    between = spec.checkpoint.steps_between
    if not every or between is None or retention.keep_every:
        return
    between *= spec.checkpoint.tiers.shared_interval
    if every > retention.keep * between:
        raise ValueError(
            f"verify.gradients_interval_steps ({every}) must be at most checkpoint.retention.keep "
            f"x the steps between two saves ({retention.keep} x {between}): when a check fails, a "
            f"checkpoint of before the last clean check must be left"
        )


def check_plan(spec: Sections) -> None:
    """A planned layout against layouts that a person or an elastic run chooses."""
    cluster = spec.plan.cluster
    if cluster is None:
        return
    if spec.elastic.enabled:
        raise ValueError(
            f"plan.cluster ({cluster}) must be left out with elastic.enabled (true): an elastic "
            f"run keeps near the layout of [parallel], which convoy plan --write can write"
        )
    open_degrees = {"dp_shard": -1}
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"):
        degree, default = getattr(spec.parallel, axis), open_degrees.get(axis, 1)
        if degree != default:
            raise ValueError(
                f"parallel.{axis} ({degree}) must be left out with plan.cluster ({cluster}): the "
                f"planner chooses the degrees"
            )


def check_init(spec: Sections) -> None:
    """What a run begins from."""
    if spec.init.state == "weights":
        return
    if spec.init.checkpoint is None:
        raise ValueError("init.state (training) needs init.checkpoint: there is no other training")
    if spec.tune is not None:
        raise ValueError(
            "init.state (training) must be weights with [tune]: what is frozen has no moments"
        )


def check_tune(spec: Sections) -> None:
    """What adapters of experts do not go with."""
    lora = None if spec.tune is None else spec.tune.lora
    if lora is None or "experts" not in lora.on or spec.moe is None:
        return
    if spec.train.exact:
        raise ValueError(
            "train.exact (true) must be false where tune.lora.on has experts: their adapters have "
            "no exact sums; attention and dense layers may have adapters"
        )
    if spec.moe.backend == "megablocks":
        raise ValueError(
            "moe.backend (megablocks) must be auto, loop, grouped_mm or packed where tune.lora.on "
            "has experts: MegaBlocks has no products of adapters"
        )


ALL_CHECKS = (
    check_moe,
    check_pipeline,
    check_compile,
    check_sequences,
    check_tensor_parallel,
    check_float8,
    check_schedule,
    check_checkpoint,
    check_faults,
    check_stragglers,
    check_verify,
    check_exact,
    check_plan,
    check_init,
    check_tune,
)
"""In the order in which a spec is checked."""
