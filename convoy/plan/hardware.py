"""A cluster as data: chips, links and prices; seconds of GEMMs and of collectives on it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from corpus.config import Section
from pretrain.errors import InputError
from pretrain.spec import one_line, read_table

DtypeName = Literal["float32", "bfloat16", "float16", "float8"]
_CLUSTERS = Path(__file__).parent / "clusters"
BYTES: dict[DtypeName, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


class GemmCurve(Section):
    """The ``[chip.gemm]`` section: the share of the peak that a GEMM of some shape reaches.

    A GEMM is cut into tiles of its output, and ``units`` of them are computed at a time: the last
    such wave and tiles at the edges are not full. The start and the end of a tile take as long as
    ``half_depth`` more of the sum. A GEMM is never faster than its matrices are read and written.
    """

    best: dict[DtypeName, Annotated[float, Field(gt=0, le=1)]]
    """By dtype: the largest share of the peak that any shape reaches, as measured."""
    tile: int = Field(ge=1, le=4096)
    """Rows and columns of one tile of the output."""
    units: int = Field(ge=1, le=100_000)
    """The number of tiles that are computed at a time: streaming multiprocessors, or cores."""
    half_depth: float = Field(ge=0, le=65_536)
    """The length of the sum at which a tile reaches half of ``best``."""
    launch_microseconds: float = Field(ge=0, le=10_000)
    """From the end of one kernel until the next one computes."""


class AttentionCurve(Section):
    """The ``[chip.attention]`` section: fused attention's share of the peak."""

    best: float = Field(gt=0, le=1)
    """The share of the bfloat16 peak that forward and backward together reach on long sequences."""
    half_length: float = Field(ge=0, le=65_536)
    """The number of keys at which it reaches half of ``best``."""


class Chip(Section):
    """The ``[chip]`` section: one accelerator, or one process's share of a CPU."""

    peak_teraflops: dict[DtypeName, Annotated[float, Field(gt=0)]]
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
        for dtype in self.peak_teraflops:
            if dtype not in self.gemm.best:
                raise ValueError(
                    f"chip.gemm.best.{dtype}: required, for chip.peak_teraflops has {dtype}"
                )
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


class Link(Section):
    """The ``[intra_node]`` or the ``[inter_node]`` section: what one chip is connected with."""

    gigabytes_per_second: float = Field(gt=0, le=1e6)
    """Of one chip, in one direction, in 10^9 bytes a second, by the data sheet."""
    efficiency: float = Field(gt=0, le=1)
    """The share of it that a collective of large messages reaches."""
    all_to_all_efficiency: float = Field(gt=0, le=1)
    """The share of it that an all-to-all reaches."""
    latency_microseconds: float = Field(ge=0, le=1e6)
    """From one step of a collective to the next, in microseconds."""

    @property
    def rate(self) -> float:
        """Bytes a second of a collective of large messages."""
        return self.gigabytes_per_second * self.efficiency * 1e9

    @property
    def all_to_all_rate(self) -> float:
        """Bytes a second of an all-to-all."""
        return self.gigabytes_per_second * self.all_to_all_efficiency * 1e9


class Cluster(Section):
    """A CLUSTER.toml: equal nodes of equal chips."""

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

    def group_shape(self, size: int, stride: int) -> tuple[int, int]:
        """(ranks on one node, nodes) of a group of ``size`` ranks that are ``stride`` apart."""
        here = max(1, min(size, self.gpus_per_node // stride))
        return here, -(-size // here)

    # Seconds of a collective of a group of ``size`` ranks that are ``stride`` apart. Bandwidths are
    # of one rank in one direction.

    def gather_seconds(self, bytes_whole: float, size: int, stride: int, pieces: int = 1) -> float:
        """An all-gather to, or a reduce-scatter from, ``bytes_whole`` on every rank, in ``pieces``.

        By rings: every rank sends (g - 1) / g of the bytes. A ring over several nodes is as fast as
        the slower of a rank's link within the node and the links of the group's ranks of a node to
        another. Latency is that of a ring or of a tree, the shorter.
        """
        if size == 1 or bytes_whole <= 0:
            return 0.0
        here, nodes = self.group_shape(size, stride)
        inner, outer = self.intra_node, self.inter_node
        rate = inner.rate if here > 1 else math.inf
        if nodes > 1:
            rate = min(rate, here * outer.rate)
        hops = pieces * self._latency(here, nodes)
        return bytes_whole * (size - 1) / size / rate + hops

    def reduce_seconds(self, bytes_whole: float, size: int, stride: int) -> float:
        """An all-reduce: a reduce-scatter and an all-gather."""
        return 2 * self.gather_seconds(bytes_whole, size, stride)

    def exchange_seconds(self, bytes_sent: float, size: int, far_share: float = 1.0) -> float:
        """An all-to-all of neighbours: each sends ``bytes_sent`` in equal parts, one to itself.

        Parts for the own node and for other nodes travel at the same time. Of those for other nodes
        ``far_share`` crosses to them, and the receiving node spreads it over its own links.
        """
        if size == 1 or bytes_sent <= 0:
            return 0.0
        here, nodes = self.group_shape(size, 1)
        inner, outer = self.intra_node, self.inter_node
        near = bytes_sent * (here - 1) / size
        far = bytes_sent * (size - here) / size
        seconds = near / inner.all_to_all_rate
        if nodes > 1:
            seconds += far / inner.all_to_all_rate * (far_share < 1)
            far *= far_share
            far_seconds = far / outer.all_to_all_rate
            seconds = max(seconds, far_seconds)
        return seconds + self._latency(here, nodes)

    def send_seconds(self, bytes_sent: float, stride: int) -> float:
        """From one rank to the rank ``stride`` further."""
        link = self.intra_node if stride < self.gpus_per_node else self.inter_node
        return bytes_sent / link.rate + link.latency_microseconds * 1e-6

    def _latency(self, here: int, nodes: int) -> float:
        inner = self.intra_node.latency_microseconds * 1e-6
        outer = self.inter_node.latency_microseconds * 1e-6
        ring = (here - 1) * inner + (nodes - 1) * outer
        tree = math.ceil(math.log2(here)) * inner + math.ceil(math.log2(nodes)) * outer
        return min(ring, 2 * tree)


def shipped_clusters() -> list[str]:
    """The names of the cluster files that come with Convoy."""
    return sorted(path.stem for path in _CLUSTERS.glob("*.toml"))


def load_cluster(name_or_file: str, asked_by: str = "--cluster") -> Cluster:
    """Read a cluster file: one that comes with Convoy by its name, or a path.

    Args:
        name_or_file: what a person gave.
        asked_by: the option or the field that has it, for errors.

    Raises InputError: one line that names the field, the value and the rule.
    """
    known = shipped_clusters()
    if name_or_file in known:
        name_or_file = str(_CLUSTERS / f"{name_or_file}.toml")
    file = Path(name_or_file)
    if not file.suffix and not file.exists():
        raise InputError(
            f"{asked_by} ({name_or_file}) must be a file, or one of {', '.join(known)}"
        )
    try:
        return Cluster.model_validate(read_table(file, "cluster"))
    except ValidationError as error:
        raise InputError(f"cluster {file}: {one_line(error, Cluster)}") from None
