"""The job spec: one TOML or JSON file, composed from the config of every part."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import SerializerFunctionWrapHandler, field_serializer, model_validator

from moe import MoEConfig
from parallel import ParallelConfig, Topology
from parallel.layout import count_ranks, nodes_per_token
from pretrain.errors import InputError
from pretrain.spec.checks import ALL_CHECKS
from pretrain.spec.layer import moe_fields
from pretrain.spec.nearest import nearest_layouts
from pretrain.spec.sections import Sections


class JobSpec(Sections):
    """Everything that a run depends on, with the rules between the tables.

    Raises ValidationError (a ValueError) for fields that do not fit together.
    """

    @model_validator(mode="before")
    @classmethod
    def _fill_moe(cls, data: Any) -> Any:
        for field, origin in MoEConfig.OF_OTHER_SECTIONS.items():
            if isinstance(data.get("moe"), dict) and field in data["moe"]:
                raise ValueError(f"moe.{field}: no such field; it follows from {origin}")
        return {**data, "moe": moe_fields(data)} if "moe" in data else data

    @field_serializer("moe", mode="wrap")
    def _options_of_moe(
        self, moe: MoEConfig | None, dump: SerializerFunctionWrapHandler
    ) -> dict[str, Any] | None:
        values: dict[str, Any] | None = dump(moe)
        if values is None:
            return None
        return {k: v for k, v in values.items() if k not in MoEConfig.OF_OTHER_SECTIONS}

    @model_validator(mode="after")
    def _check(self) -> JobSpec:
        for check in ALL_CHECKS:
            check(self)
        return self

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
        """Target tokens of one step after the batch-size ramp-up."""
        return self.batch.global_batch_size * self.data.seq_len

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
            nearest = nearest_layouts(self.parallel, world, self.fits)
            known = "; ".join(self._typed(topology) for topology in nearest)
            hint = f"layouts that work on {count_ranks(world)}: {known}" if known else (
                f"no layout of {count_ranks(world)} works for this model and data"
            )  # fmt: skip
            raise InputError(f"{error}; {hint}") from None

    def _typed(self, topology: Topology) -> str:
        """A layout as a person can set the layout: degrees above one, or those to be set to 1."""
        if topology.world > 1:
            return topology.describe()
        above = [name for name in topology.as_dict() if getattr(self.parallel, name) > 1]
        return " ".join(f"{name}=1" for name in above) or topology.describe()

    def _topology(self, world: int) -> Topology:
        topology = self.parallel.topology(world)
        self._check_experts(topology)
        return topology

    def _check_experts(self, topology: Topology) -> None:
        if self.moe is None or topology.efsdp == 1:
            return
        # fully_shard cuts a dim other than the first only evenly.
        sizes = {"model.d_model": self.moe.d_model, "moe.d_ff": self.moe.d_ff}
        for field, size in sizes.items():
            if size % topology.efsdp:
                raise ValueError(
                    f"{field} ({size}) must be a multiple of dp_shard x cp x tp / ep "
                    f"({topology.dp_shard} x {topology.cp} x {topology.tp} / {topology.ep} = "
                    f"{topology.efsdp}), the ranks that share an expert"
                )

    def check_nodes(self, topology: Topology, ranks_per_node: int) -> None:
        """The rules between a layout and nodes of ``ranks_per_node`` ranks.

        Raises InputError where tensor parallelism would cross nodes, or a token would reach more
        nodes than the spec allows.
        """
        tp = topology.tp
        if tp > 1 and ranks_per_node % tp and not self.parallel.tp_across_nodes:
            raise InputError(
                f"parallel.tp ({tp}) must divide the ranks of a node ({ranks_per_node}), or "
                f"parallel.tp_across_nodes must be true: every layer waits for these ranks four "
                f"times"
            )
        most, moe = self.parallel.max_nodes_per_token, self.moe
        if not most or moe is None:
            return
        if topology.ep % ranks_per_node and ranks_per_node % topology.ep:
            raise InputError(
                f"parallel.ep ({topology.ep}) must be a multiple or a divisor of the ranks of a "
                f"node ({ranks_per_node}) with parallel.max_nodes_per_token ({most})"
            )
        reached = nodes_per_token(
            moe.num_experts,
            moe.n_groups,
            moe.topk_groups,
            moe.max_experts_per_token,
            topology.ep,
            ranks_per_node,
        )
        if reached > most:
            raise InputError(
                f"parallel.max_nodes_per_token ({most}) must be at least {reached}: "
                f"moe.topk_groups ({moe.topk_groups}) of moe.n_groups ({moe.n_groups}) reach so "
                f"many nodes with parallel.ep ({topology.ep}) and {count_ranks(ranks_per_node)} on "
                f"a node"
            )

    def with_layout(
        self, parallel: ParallelConfig, micro_batch_size: int, world: int, ranks_per_node: int
    ) -> JobSpec:
        """This spec with another layout and micro-batch on ``world`` ranks.

        Other sections are not read again, so that a search can ask for thousands of layouts.
        Raises ValueError where a rule between the spec and the layout is broken.
        """
        batch = self.batch.model_copy(update={"micro_batch_size": micro_batch_size})
        moe = self.moe
        if moe is not None and moe.dispatcher_traits.fixed_size:
            tokens = micro_batch_size * self.data.seq_len
            moe = moe.model_copy(update={"max_tokens_per_call": tokens})
        spec = self.model_copy(update={"parallel": parallel, "batch": batch, "moe": moe})
        for check in ALL_CHECKS:
            check(spec)
        spec.check_nodes(spec._topology(world), min(ranks_per_node, world))
        return spec

    def fits(self, topology: Topology) -> bool:
        """Whether every rule between this spec and the degrees of a layout holds."""
        try:
            self._check_experts(topology)  # first: the other rules need a new spec
            sections = self.as_dict()
            sections["parallel"] |= topology.as_dict()
            JobSpec.model_validate(sections)
        except ValueError:
            return False
        return True
