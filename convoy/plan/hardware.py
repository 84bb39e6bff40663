"""A cluster as data: chips, links, prices, and how near each comes to its peak."""

from __future__ import annotations

import math
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from convoy.plan.causes import CONFIG
from pretrain.errors import InputError
from pretrain.spec import read_table

DtypeName = Literal["float32", "bfloat16", "float16", "float8"]
BYTES: dict[DtypeName, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


class GemmCurve(BaseModel):
    """The ``[chip.gemm]`` section: the share of the peak that a GEMM of some shape reaches.

    A GEMM is cut into tiles of its output, and ``units`` of them are computed at a time: the last
    such wave and tiles at the edges are not full. The start and the end of a tile take as long as
    ``half_depth`` more of the sum. A GEMM is never faster than its matrices are read and written.
    """

    model_config = CONFIG

    best: dict[DtypeName, float]
    """By dtype: the largest share of the peak that any shape reaches, as measured."""
    tile: int = Field(ge=1, le=4096)
    """Rows and columns of one tile of the output."""
    units: int = Field(ge=1, le=100_000)
    """The number of tiles that are computed at a time: streaming multiprocessors, or cores."""
    half_depth: float = Field(ge=0, le=65_536)
    """The length of the sum at which a tile reaches half of ``best``."""
    launch_microseconds: float = Field(ge=0, le=10_000)
    """From the end of one kernel until the next one computes."""


class AttentionCurve(BaseModel):
    """The ``[chip.attention]`` section: fused attention's share of the peak."""

    model_config = CONFIG

    best: float = Field(gt=0, le=1)
    """The share of the bfloat16 peak that forward and backward together reach on long sequences."""
    half_length: float = Field(ge=0, le=65_536)
    """The number of keys at which it reaches half of ``best``."""


class Chip(BaseModel):
    """The ``[chip]`` section: one accelerator, or one process's share of a CPU."""

    model_config = CONFIG

    peak_teraflops: dict[DtypeName, float]
    """By dtype: the dense peak of the data sheet, in 10^12 operations a second."""
    memory_gib: float = Field(gt=0, le=100_000)
    """The size of its memory, in GiB."""
    memory_gigabytes_per_second: float = Field(gt=0, le=1e6)
    """The bandwidth of its memory, in 10^9 bytes a second."""
    memory_efficiency: float = Field(gt=0, le=1)
    """The share of that bandwidth which element-wise kernels reach."""
    reserved_gib: float = Field(ge=0)
    """What the driver, the communication library and the allocator's gaps take, in GiB."""
    sustained: float = Field(gt=0, le=1)
    """The share of its measured best that a chip keeps in a long synchronous run: it is limited by
    power and heat, and every collective waits for the slowest of the chips."""
    kernels: Literal["accelerator", "cpu"] = "accelerator"
    """Which of PyTorch's kernels run: those of a CPU keep more for the backward, because norms are
    several operations there."""
    gemm: GemmCurve
    """GEMMs by shape."""
    attention: AttentionCurve
    """Fused attention."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.peak_teraflops:
            raise ValueError("chip.peak_teraflops: needs a dtype, bfloat16 = 989.0 for example")
        for dtype, peak in self.peak_teraflops.items():
            if peak <= 0:
                raise ValueError(f"chip.peak_teraflops.{dtype} ({peak}) must be above 0")
            best = self.gemm.best.get(dtype)
            if best is None:
                raise ValueError(
                    f"chip.gemm.best.{dtype}: required, for chip.peak_teraflops has {dtype}"
                )
            if not 0 < best <= 1:
                raise ValueError(f"chip.gemm.best.{dtype} ({best}) must be above 0, and at most 1")
        if self.reserved_gib >= self.memory_gib:
            raise ValueError(
                f"chip.reserved_gib ({self.reserved_gib:g}) must be less than chip.memory_gib "
                f"({self.memory_gib:g})"
            )
        return self

    @property
    def memory_bytes(self) -> float:
        """Bytes that a rank can use."""
        return (self.memory_gib - self.reserved_gib) * 2**30

    def peak(self, dtype: DtypeName) -> float:
        """Operations a second at the peak. Raises InputError for a dtype without a peak."""
        if dtype not in self.peak_teraflops:
            raise InputError(
                f"chip.peak_teraflops has {', '.join(self.peak_teraflops)}, and not {dtype}, which "
                f"the spec computes in (precision.compute)"
            )
        return self.peak_teraflops[dtype] * 1e12

    def stream_seconds(self, bytes_moved: float) -> float:
        """Seconds of an element-wise kernel that reads and writes so many bytes in all."""
        return bytes_moved / (self.memory_gigabytes_per_second * 1e9 * self.memory_efficiency)

    def gemm_seconds(
        self, m: float, n: float, k: float, dtype: DtypeName, count: float = 1
    ) -> float:
        """Seconds of ``count`` products [m, k] x [k, n] in one launch, as a grouped GEMM does."""
        if m <= 0 or n <= 0 or k <= 0 or count <= 0:
            return 0.0
        curve, size = self.gemm, BYTES[dtype]
        m = max(m, 1.0)  # a mean of fewer rows than one: somebody's row is a whole one
        tiles = count * math.ceil(m / curve.tile) * math.ceil(n / curve.tile)
        waves = math.ceil(tiles / curve.units)
        flops = 2.0 * waves * curve.units * curve.tile**2 * (k + curve.half_depth)
        compute = flops / (self.peak(dtype) * curve.best[dtype] * self.sustained)
        moved = count * size * (m * k + k * n + m * n)
        return max(compute, self.stream_seconds(moved)) + curve.launch_microseconds * 1e-6

    def attention_seconds(self, flops: float, keys: float, dtype: DtypeName) -> float:
        """Seconds of fused attention of so many operations, each query with ``keys`` keys."""
        wide: DtypeName = "bfloat16" if dtype == "float8" else dtype
        curve = self.attention
        seconds = flops / (self.peak(wide) * curve.best * self.sustained)
        return seconds * (1 + curve.half_length / max(keys, 1))


class Link(BaseModel):
    """The ``[intra_node]`` or the ``[inter_node]`` section: what one chip is connected with."""

    model_config = CONFIG

    gigabytes_per_second: float = Field(gt=0, le=1e6)
    """Of one chip, in one direction, in 10^9 bytes a second, by the data sheet."""
    efficiency: float = Field(gt=0, le=1)
    """The share of it that a collective of large messages reaches."""
    all_to_all_efficiency: float = Field(gt=0, le=1)
    """The share of it that an all-to-all reaches."""
    latency_microseconds: float = Field(ge=0, le=1e6)
    """From one step of a collective to the next, in microseconds."""


class Cluster(BaseModel):
    """A CLUSTER.toml: equal nodes of equal chips."""

    model_config = CONFIG

    name: str = Field(min_length=1)
    """What people call it."""
    gpus_per_node: int = Field(ge=1, le=1024)
    """Chips of one node, which the intra-node link connects."""
    nodes: int = Field(ge=1, le=1_000_000)
    """Nodes, where ``--gpus`` says nothing else."""
    dollars_per_gpu_hour: float = Field(ge=0)
    """The price of one chip for an hour, with its share of the node."""
    watts_per_gpu: float = Field(ge=0)
    """The power of one chip with its share of the node, without cooling."""
    chip: Chip
    """One chip."""
    intra_node: Link
    """Within a node."""
    inter_node: Link
    """Between nodes."""

    def __hash__(self) -> int:  # by value, as equality is; tables of rates have no hash
        return hash((self.name, self.gpus_per_node, self.nodes))

    @property
    def gpus(self) -> int:
        """Chips of all nodes."""
        return self.nodes * self.gpus_per_node


def shipped_clusters() -> list[str]:
    """The names of the cluster files that come with Convoy."""
    folder = resources.files("convoy.plan") / "clusters"
    return sorted(each.name.removesuffix(".toml") for each in folder.iterdir())


def load_cluster(name_or_file: str, asked_by: str = "--cluster") -> Cluster:
    """Read a cluster file: one that comes with Convoy by its name, or a path.

    Args:
        name_or_file: what a person gave.
        asked_by: the option or the field that has it, for errors.

    Raises InputError: one line that names the field, the value and the rule.
    """
    known = shipped_clusters()
    if name_or_file in known:
        path = resources.files("convoy.plan") / "clusters" / f"{name_or_file}.toml"
        with resources.as_file(path) as file:
            return _read(Path(file))
    file = Path(name_or_file)
    if not file.suffix and not file.exists():
        raise InputError(
            f"{asked_by} ({name_or_file}) must be a file, or one of {', '.join(known)}"
        )
    return _read(file)


def _read(path: Path) -> Cluster:
    try:
        return Cluster.model_validate(read_table(path, "cluster"))
    except ValidationError as error:
        raise InputError(f"cluster {path}: {_one_line(error)}") from None


def _one_line(error: ValidationError) -> str:
    first = sorted(error.errors(), key=lambda each: each["type"] != "extra_forbidden")[0]
    where = ".".join(str(part) for part in first["loc"] if part != "[key]")
    match first["type"]:
        case "value_error":
            return str(first["ctx"]["error"])
        case "missing":
            return f"{where}: required"
        case "extra_forbidden":
            return f"{where}: no such field"
    return f"{where} ({first['input']!r}): {first['msg']}"


@lru_cache(1 << 16)
def group_shape(size: int, stride: int, gpus_per_node: int) -> tuple[int, int]:
    """(ranks on one node, nodes) of a group of ``size`` ranks that are ``stride`` apart."""
    here = max(1, min(size, gpus_per_node // stride))
    return here, -(-size // here)
