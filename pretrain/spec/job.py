"""The job spec: one TOML or JSON file, composed from the config of every part."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    model_validator,
)

from moe import MoEConfig
from parallel import ParallelConfig, Topology
from pretrain.data import DataConfig
from pretrain.errors import InputError
from pretrain.model import ModelConfig
from pretrain.optim import OptimizerConfig, ScheduleConfig
from pretrain.spec.checkpoint import CheckpointConfig
from pretrain.spec.nearest import nearest_layouts
from pretrain.spec.train import TrainConfig


class MetricsConfig(BaseModel):
    """The ``[metrics]`` section."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    port: int = Field(default=-1, ge=-1, le=65535)
    """Of the Prometheus endpoint on rank 0; 0 takes a free one, -1 makes none."""
    host: str = "127.0.0.1"


class SampleConfig(BaseModel):
    """The ``[sample]`` section: the text that the summary ends with."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    prompt: str = ""
    tokens: int = Field(default=0, ge=0)
    temperature: float = Field(default=0.8, ge=0)
    """0 takes the likeliest token."""


class JobSpec(BaseModel):
    """Everything that a run depends on."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    run_dir: str | None = None
    """Log, summary and checkpoints; runs/NAME where it is left out."""
    model: ModelConfig
    moe: MoEConfig | None = None
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()
    sample: SampleConfig = SampleConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill_d_model(cls, data: Any) -> Any:
        model, moe = data.get("model"), data.get("moe")
        if isinstance(model, dict) and isinstance(moe, dict) and "d_model" not in moe:
            return {**data, "moe": {**moe, "d_model": model.get("d_model")}}
        return data

    @model_validator(mode="after")
    def _check(self) -> JobSpec:
        m, t, p = self.model, self.train, self.parallel
        if self.moe is not None:
            if self.moe.d_model != m.d_model:
                raise ValueError(
                    f"moe.d_model ({self.moe.d_model}) must be model.d_model ({m.d_model}); "
                    f"leave it out"
                )
            if self.moe.num_experts < p.ep:
                raise ValueError(
                    f"moe.num_experts ({self.moe.num_experts}) must be at least parallel.ep "
                    f"({p.ep})"
                )
            if self.moe.num_experts % p.ep:
                raise ValueError(
                    f"moe.num_experts ({self.moe.num_experts}) must be a multiple of parallel.ep "
                    f"({p.ep})"
                )
        elif p.ep > 1:
            raise ValueError(f"parallel.ep ({p.ep}) must be 1 where there is no [moe] section")
        if m.d_ff == 0 and (self.moe is None or m.first_k_dense):
            raise ValueError(
                "model.d_ff (0) must be at least 1 where a layer is dense: "
                "model.first_k_dense is above 0 or there is no [moe] section"
            )
        stages = p.pp * p.pp_stages_per_rank
        if stages > m.num_layers:
            raise ValueError(
                f"model.num_layers ({m.num_layers}) must be at least parallel.pp x "
                f"parallel.pp_stages_per_rank ({p.pp} x {p.pp_stages_per_rank} stages)"
            )
        if p.pp > 1 and m.tie_embeddings:
            raise ValueError(
                f"parallel.pp ({p.pp}) must be 1 with model.tie_embeddings (true): the first stage "
                f"and the last would share a matrix"
            )
        if t.compile and self.data.document_mask:
            raise ValueError(
                "train.compile (true) must be false with data.document_mask (true): where "
                "documents end changes with every batch"
            )
        if t.compile and p.recompute == "selective":
            raise ValueError(
                "train.compile (true) must be false with parallel.recompute (selective): what is "
                "within a compiled region cannot be selected"
            )
        self._check_sequences()
        self._check_tensor_parallel()
        most = t.micro_batch_size * self.data.seq_len
        if self.moe is not None and 0 < self.moe.max_tokens < most:
            raise ValueError(
                f"moe.max_tokens ({self.moe.max_tokens}) must be at least train.micro_batch_size x "
                f"data.seq_len ({t.micro_batch_size} x {self.data.seq_len} = {most})"
            )
        policy = None if self.moe is None else self.moe.capacity_policy
        if policy == "straggler_aware" and p.ep == 1:
            raise ValueError(
                "parallel.ep (1) must be at least 2 with moe.capacity_policy (straggler_aware): "
                "ranks that hold all experts have no work to pass on"
            )
        if t.replay_capacity_plans and policy != "straggler_aware":
            raise ValueError(
                f"train.replay_capacity_plans ({t.replay_capacity_plans}) must be empty unless "
                f"moe.capacity_policy ({policy}) is straggler_aware"
            )
        self._check_batch()
        if self.schedule.warmup_steps + self.schedule.decay_steps > t.steps:
            raise ValueError(
                f"schedule.warmup_steps + decay_steps ({self.schedule.warmup_steps} + "
                f"{self.schedule.decay_steps}) must be at most train.steps ({t.steps})"
            )
        if 0 < m.max_seq_len < self.data.seq_len:
            raise ValueError(
                f"data.seq_len ({self.data.seq_len}) must be at most model.max_seq_len "
                f"({m.max_seq_len})"
            )
        if self.data.seq_len >= self.data.shard_tokens:
            raise ValueError(
                f"data.seq_len ({self.data.seq_len}) must be less than data.shard_tokens "
                f"({self.data.shard_tokens}): no sequence crosses from one shard into the next"
            )
        if self.checkpoint.keep_best and not t.eval_interval_steps:
            raise ValueError(
                f"checkpoint.keep_best ({self.checkpoint.keep_best}) must be 0 without "
                f"train.eval_interval_steps: nothing tells which is best"
            )
        return self

    def _check_batch(self) -> None:
        t = self.train
        if t.micro_batch_size > t.global_batch_size:
            raise ValueError(
                f"train.micro_batch_size ({t.micro_batch_size}) must be at most "
                f"train.global_batch_size ({t.global_batch_size})"
            )
        if (t.ramp_batch_size > 0) != (t.ramp_tokens > 0) or (
            t.ramp_batch_size > t.global_batch_size
        ):
            raise ValueError(
                f"train.ramp_batch_size ({t.ramp_batch_size}) must be at most "
                f"train.global_batch_size ({t.global_batch_size}), and above 0 with "
                f"train.ramp_tokens ({t.ramp_tokens}), or both 0"
            )

    def _check_sequences(self) -> None:
        p, seq_len = self.parallel, self.data.seq_len
        if p.cp > 1 and seq_len % (2 * p.cp * p.tp):
            raise ValueError(
                f"data.seq_len ({seq_len}) must be a multiple of 2 x parallel.cp x parallel.tp "
                f"(2 x {p.cp} x {p.tp}): a rank takes a piece of a sequence's first half and one "
                f"of its second"
            )
        if seq_len % p.tp:
            raise ValueError(
                f"data.seq_len ({seq_len}) must be a multiple of parallel.tp ({p.tp}): between "
                f"products every rank has a part of the sequence"
            )

    def _check_tensor_parallel(self) -> None:
        tp, m = self.parallel.tp, self.model
        if tp == 1:
            return
        for field in ("num_heads", "num_kv_heads", "d_ff", "vocab_size"):
            if getattr(m, field) % tp:
                raise ValueError(
                    f"model.{field} ({getattr(m, field)}) must be a multiple of parallel.tp ({tp})"
                )
        for field, value, why in (
            ("tie_embeddings", m.tie_embeddings, "an embedding that is the output matrix too"),
            ("qk_norm", m.qk_norm == "all_heads" and m.qk_norm, "a norm over all heads"),
        ):
            if value:
                raise ValueError(
                    f"parallel.tp ({tp}) must be 1 with model.{field} ({value}): {why} is not cut; "
                    f"parallel.dp_shard, cp and ep are for such a model"
                )

    @property
    def run_path(self) -> Path:
        """The run's folder."""
        return Path(self.run_dir or f"runs/{self.name}")

    @property
    def checkpoint_path(self) -> Path | str:
        """The checkpoint folder, or the URL of an object store's."""
        path = self.checkpoint.path
        if path is not None and "://" in path:
            return path.rstrip("/")
        return Path(path or self.run_path / "checkpoints")

    @property
    def global_batch_tokens(self) -> int:
        """Target tokens of one step, once it has grown."""
        return self.train.global_batch_size * self.data.seq_len

    def as_dict(self) -> dict[str, Any]:
        """The resolved spec as plain JSON."""
        return self.model_dump(mode="json")

    @property
    def hash(self) -> str:
        """SHA-256 of the resolved spec, whatever file or overrides it came from."""
        text = json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def topology(self, world: int) -> Topology:
        """The layout on ``world`` ranks.

        Raises InputError where the degrees do not fit; it names the nearest layouts that do.
        """
        try:
            return self._topology(world)
        except ValueError as error:
            nearest = nearest_layouts(self.parallel, world, self._fits)
            known = "; ".join(topology.describe() for topology in nearest)
            hint = f"layouts that work on {world} ranks: {known}" if known else (
                f"no layout of {world} ranks works for this model and data"
            )  # fmt: skip
            raise InputError(f"{error}; {hint}") from None

    def _topology(self, world: int) -> Topology:
        topology = self.parallel.topology(world)
        if self.moe is not None and topology.efsdp > 1:
            # fully_shard cuts a dim other than the first only evenly.
            for field in ("d_model", "d_ff"):
                size = getattr(self.moe, field)
                if size % topology.efsdp:
                    raise ValueError(
                        f"moe.{field} ({size}) must be a multiple of dp_shard x cp x tp / ep "
                        f"({topology.dp_shard} x {topology.cp} x {topology.tp} / {topology.ep} = "
                        f"{topology.efsdp}), the ranks that share an expert"
                    )
        return topology

    def _fits(self, topology: Topology) -> bool:
        sections = self.as_dict()
        sections["parallel"] |= topology.as_dict()
        try:
            JobSpec.model_validate(sections)._topology(topology.world)
        except ValueError:
            return False
        return True
