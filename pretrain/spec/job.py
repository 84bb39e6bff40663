"""The job spec: one TOML or JSON file, composed from the config of every part."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import model_validator

from parallel import Topology
from parallel.layout import count_ranks
from pretrain.errors import InputError
from pretrain.spec.checks import ALL_CHECKS
from pretrain.spec.nearest import nearest_layouts
from pretrain.spec.renamed import former_names
from pretrain.spec.sections import Sections


class JobSpec(Sections):
    """Everything that a run depends on, with the rules between the tables.

    Raises ValidationError (a ValueError) for fields that do not fit together.
    """

    @model_validator(mode="before")
    @classmethod
    def _refuse_former_names(cls, data: Any) -> Any:
        if isinstance(data, dict) and (lines := list(former_names(data))):
            raise ValueError("; ".join(lines))
        return data

    @model_validator(mode="before")
    @classmethod
    def _fill_d_model(cls, data: Any) -> Any:
        model, moe = data.get("model"), data.get("moe")
        if isinstance(model, dict) and isinstance(moe, dict) and "d_model" not in moe:
            return {**data, "moe": {**moe, "d_model": model.get("d_model")}}
        return data

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
            known = "; ".join(topology.describe() for topology in nearest)
            hint = f"layouts that work on {count_ranks(world)}: {known}" if known else (
                f"no layout of {count_ranks(world)} works for this model and data"
            )  # fmt: skip
            raise InputError(f"{error}; {hint}") from None

    def _topology(self, world: int) -> Topology:
        topology = self.parallel.topology(world)
        self._check_experts(topology)
        return topology

    def _check_experts(self, topology: Topology) -> None:
        if self.moe is None or topology.efsdp == 1:
            return
        # fully_shard cuts a dim other than the first only evenly.
        for field in ("d_model", "d_ff"):
            size = getattr(self.moe, field)
            if size % topology.efsdp:
                raise ValueError(
                    f"moe.{field} ({size}) must be a multiple of dp_shard x cp x tp / ep "
                    f"({topology.dp_shard} x {topology.cp} x {topology.tp} / {topology.ep} = "
                    f"{topology.efsdp}), the ranks that share an expert"
                )

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
