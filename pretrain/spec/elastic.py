"""The ``[elastic]`` section of the spec."""

from __future__ import annotations

from pretrain.section import OnResume, Section


class ElasticConfig(Section):
    """The ``[elastic]`` section: a run that goes on with other ranks."""

    on_resume = OnResume.FREE

    enabled: bool = False
    """Choose a layout for the ranks that a start has, where the layout of ``[parallel]`` needs
    another number of ranks, and resume a checkpoint of any layout. The global batch, the samples
    and their order stay as they are. Ranks that the layout leaves over stand by as spares."""

    warm_restart: bool = False
    """Experimental. Start all ranks again without new Python processes when a rank fails: the
    process that torchrun starts imports everything and forks the process that trains, as often as
    ``--max-restarts`` says. Where a machine is lost too, torchrun's own restart follows. On GPUs
    each new process makes its own CUDA context; no GPU has run this yet."""
