"""The model of a spec, spread over ranks, on this rank."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.utils.deterministic
from torch import Tensor

from ckpt import LocalArray
from moe import DISPATCHER, choose_backend, why_no_float8
from parallel import Documents, ParallelDims, ShardLayout, Topology, grad_square_sum
from parallel.crossing import gate
from pretrain.errors import InputError
from pretrain.model import Decoder, DecoderOutput, init_parameters
from pretrain.parallelize import (
    LocalBatch,
    ParallelModel,
    RoutedTokens,
    RoutingStats,
    mask_of,
    parallelize,
    routing_stats,
)
from pretrain.runtime import Runtime
from pretrain.spec import JobSpec, PrecisionConfig
from pretrain.state import model_arrays


def compute_dtype(precision: PrecisionConfig) -> torch.dtype:
    """The dtype of GEMMs, by ``precision.compute``."""
    dtype: torch.dtype = getattr(torch, precision.compute)
    return dtype


@dataclass(frozen=True, kw_only=True)
class RankModel:
    """The parallelized model on one rank: enough for forwards."""

    spec: JobSpec
    runtime: Runtime
    topology: Topology
    dims: ParallelDims
    parallel_model: ParallelModel
    local_batch: LocalBatch

    @property
    def model(self) -> Decoder:
        """The layers of this rank's stages."""
        return self.parallel_model.local_model

    @property
    def layouts(self) -> dict[str, ShardLayout]:
        """Who holds which slice of every parameter and buffer, by name."""
        return self.parallel_model.layouts

    def forward(
        self,
        inputs_BS: Tensor,
        documents: Documents | None = None,
        routed: RoutedTokens | None = None,
    ) -> tuple[DecoderOutput | None, RoutingStats | None]:
        """The model's output, where the last stage is, and what this rank's routers did.

        ``routed`` are the tokens that MoE layers route; None where all inputs are tokens.
        """
        gate()
        pipeline = self.parallel_model.pipeline
        if pipeline is not None:
            return pipeline.forward(inputs_BS, self.local_batch, documents, routed)
        mask = {} if routed is None else mask_of(routed, inputs_BS.device)
        out: DecoderOutput = self.model(inputs_BS, None, documents, **mask)
        tokens = inputs_BS.numel() // self.local_batch.tp_degree
        if routed is not None:
            tokens = routed.tokens
        return out, routing_stats(out.aux, tokens) if out.aux else None

    def weights(self) -> list[LocalArray]:
        """Parameters and buffers, as a checkpoint has them."""
        meta_model = self.parallel_model.meta_model
        return model_arrays(meta_model, self.model, self.layouts, self.runtime.rank)

    def initialize(self) -> None:
        """Give parameters and buffers the random values that ``train.seed`` says."""
        seed, layers = self.spec.train.seed, self.spec.model.num_layers
        init_parameters(self.model, self.layouts, self.runtime.rank, seed, layers)

    def grad_square_sum(self) -> float:
        """This rank's share of the squared gradient norm: of an exact sum rank 0 has all."""
        exact = self.parallel_model.exact
        if exact is None:
            return float(grad_square_sum(self.model, self.dims))
        square = float(exact.square_sum(self.model, self.dims))
        return square if self.runtime.is_first else 0.0


def build_model(
    spec: JobSpec,
    runtime: Runtime,
    topology: Topology | None = None,
    end_token: int | None = None,
) -> RankModel:
    """Build the model on this rank; its parameters have no values yet.

    Args:
        spec: the run.
        runtime: this process.
        topology: None for the layout of ``[parallel]``.
        end_token: the id that ends a document, where tokens do not attend across documents.

    Raises InputError where the layer has no path for its sizes, or the nodes do not fit the layout.
    """
    topology = spec.topology(runtime.world) if topology is None else topology
    runtime.together(lambda: _check_device(spec, runtime.device))
    if spec.train.exact:
        _check_threads(runtime)
    if spec.train.exact or spec.verify.gradients_interval_steps:
        use_deterministic_kernels(runtime.device)
    per_node = runtime.ranks_per_node
    if runtime.maximum(per_node) != -runtime.maximum(-per_node):
        per_node = runtime.world  # nodes of different sizes are not told apart
    runtime.together(lambda: spec.check_nodes(topology, per_node))
    dims = ParallelDims.build(topology, runtime.device.type, per_node)
    parallel_model = runtime.together(lambda: _parallelize(spec, dims))
    _allocate(parallel_model, runtime.device, spec.parallel.memory.offload_optimizer)
    return RankModel(
        spec=spec,
        runtime=runtime,
        topology=topology,
        dims=dims,
        parallel_model=parallel_model,
        local_batch=LocalBatch(
            dims,
            end_token,
            spec.data.has_masked_targets,
            spec.model.num_mtp_layers,
            spec.train.exact,
        ),
    )


def use_deterministic_kernels(device: torch.device) -> None:
    """On CUDA have this process use kernels that give equal bits when repeated, and raise where
    there is none; the kernels of a CPU give equal bits anyway.

    Attention's backward and cuBLAS have two ways each: see PyTorch's page on reproducibility.
    """
    if device.type != "cuda":
        return
    # Read by cuBLAS at the process's first product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Nothing reads memory that was never written, and filling the memory would take time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _check_device(spec: JobSpec, device: torch.device) -> None:
    device_type = device.type
    for field in ("offload_optimizer", "offload_activations"):
        if getattr(spec.parallel.memory, field) and device_type == "cpu":
            raise InputError(
                f"parallel.memory.{field} (true) must be false on a CPU: everything is in host "
                f"memory"
            )
    for field, gemm in (("experts", spec.precision.experts), ("dense", spec.precision.dense)):
        why = why_no_float8(device) if gemm == "float8" else ""
        if why:
            raise InputError(
                f"precision.{field} (float8) must have a device with products in float8: {why}"
            )
    m = spec.moe
    if m is None:
        return
    dispatcher = DISPATCHER.load(m.dispatcher)
    why = dispatcher.unavailable(compute_dtype(spec.precision), device_type)
    if why and spec.parallel.ep > 1:
        raise InputError(f"moe.dispatcher ({m.dispatcher}) {why}")
    try:
        choose_backend(m.backend, m.d_model, m.d_ff, compute_dtype(spec.precision), device_type)
    except ValueError as error:
        raise InputError(str(error)) from None


def _allocate(parallel_model: ParallelModel, device: torch.device, offload: bool) -> None:
    """Allocate parameters, in host memory with ``offload``, and buffers on the device."""
    for stage in parallel_model.stages.values():
        stage.to_empty(device=torch.device("cpu") if offload else device)
        for module in stage.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))


def _parallelize(spec: JobSpec, dims: ParallelDims) -> ParallelModel:
    try:
        return parallelize(
            spec.model,
            spec.moe,
            parallel=spec.parallel,
            dims=dims,
            seq_len=spec.data.seq_len,
            dtype=compute_dtype(spec.precision),
            compiled=spec.train.compile,
            exact_units=_exact_units(spec),
            dense_float8=spec.precision.dense == "float8",
            tuned=spec.tune,
        )
    except ValueError as error:
        raise InputError(str(error)) from None


def _check_threads(runtime: Runtime) -> None:
    threads = torch.get_num_threads()
    most, fewest = runtime.maximum(threads), -runtime.maximum(-threads)
    if most != fewest:
        raise InputError(
            f"threads of a process ({fewest} to {most}) must be equal on all ranks with "
            f"train.exact (true): bits depend on them; set OMP_NUM_THREADS"
        )


def _exact_units(spec: JobSpec) -> int | None:
    """The micro-batches of a step, where gradients are summed exactly."""
    if not spec.train.exact:
        return None
    return -(-spec.batch.largest // spec.batch.micro_batch_size)
