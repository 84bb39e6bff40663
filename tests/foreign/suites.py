"""The suites: where their tests come from, and what of ours runs them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Suite:
    """One suite of another project."""

    name: str
    about: str
    folder: Path
    """Our adapter: it has ``exclusions.txt``."""
    files: tuple[str, ...] = ("cases.py",)
    """What pytest collects: of the adapter, or with ``theirs`` of the source."""
    theirs: bool = False
    shim: bool = False
    """Whether modules in the adapter's folder ``shim`` stand for modules that the tests import."""
    wheels: tuple[str, ...] = ()
    """What pytest needs besides, by pinned version."""
    sdist: str = ""
    """The source distribution that has the tests, by pinned version."""
    repository: str = ""
    commit: str = ""
    """Of the repository that has the tests, where no package does: a reader gets it."""
    parts: tuple[str, ...] = ("",)
    """What runs in a process each; ``FOREIGN_PART`` is its name there."""
    more: tuple[str, ...] = ()
    """Parts that run only where they are asked for: their exclusions have not been settled."""

    @property
    def exclusions(self) -> Path:
        """The file with the excluded cases."""
        return self.folder / "exclusions.txt"


ADOPTED_MODELS = Suite(
    name="adopted-models",
    about="transformers' ModelTesterMixin, with every model passed through moe.adopt",
    folder=HERE / "adopted_models",
    sdist=f"transformers=={version('transformers')}",
    wheels=("parameterized==0.9.0",),
    parts=("Mixtral", "OLMoE", "Qwen3-MoE", "DeepSeek-V3"),
    more=(
        "gpt-oss",
        "Qwen2-MoE",
        "DeepSeek-V2",
        "Llama 4",
        "ERNIE 4.5 MoE",
        "DBRX",
        "GLM-4-MoE",
        "MiniMax-M2",
        "Granite-MoE",
        "Nemotron-H",
        "AFMoE",
        "Cohere2-MoE",
    ),
)

ZARR_STORES = Suite(
    name="zarr-stores",
    about="zarr's StoreTests and state machines, over a folder, an S3 server, and a peer's memory",
    folder=HERE / "zarr_stores",
    wheels=("pytest-asyncio==1.5.0",),
)

SAMPLE_ORDER = Suite(
    name="sample-order",
    about="streaming's tests of which rank reads which sample, over the order of Convoy's loader",
    folder=HERE / "sample_order",
    sdist="mosaicml-streaming==0.13.0",
    files=("tests/test_partition.py", "tests/test_shuffle.py"),
    theirs=True,
    shim=True,
)

ROUTER_REPLAY = Suite(
    name="router-replay",
    about="Automodel's tests of routing replay, over Convoy's router",
    folder=HERE / "router_replay",
    repository="NVIDIA-NeMo/Automodel",
    commit="36044ad3d139363fb6c73c24af2e7c6b65ec52f6",
    files=("tests/unit_tests/moe/test_router_replay.py",),
    theirs=True,
    shim=True,
)

TORCH_CHECKPOINTS = Suite(
    name="torch-checkpoints",
    about="PyTorch's tests of resharding, on four ranks, with checkpoints of ckpt",
    folder=HERE / "torch_checkpoints",
    wheels=("expecttest==0.3.0",),
    repository="pytorch/pytorch",
    commit="0554fa805623c950ec6246323985320324459ab4",
    files=("test/distributed/checkpoint/test_dtensor_resharding.py",),
    theirs=True,
    shim=True,
)

SUITES = {
    suite.name: suite
    for suite in (ADOPTED_MODELS, ZARR_STORES, SAMPLE_ORDER, ROUTER_REPLAY, TORCH_CHECKPOINTS)
}
