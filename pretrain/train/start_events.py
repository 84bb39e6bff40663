"""The events that say with what a start of a run begins."""

from __future__ import annotations

from pretrain.elastic import ChosenLayout
from pretrain.job import Job
from pretrain.observe import (
    DataOpened,
    Events,
    Launched,
    RunStarted,
    experiment_record,
)
from pretrain.runtime import (
    Runtime,
)
from pretrain.state import Progress


def publish_launched(runtime: Runtime, events: Events) -> None:
    """Publish that all ranks of a launch are there."""
    events.publish(
        Launched(
            step=0,
            process_start=runtime.start_parts.began,
            launch_id=runtime.launch_id,
            world_size=runtime.world,
            start_seconds=runtime.start_parts.seconds,
        )
    )


def publish_started(job: Job, progress: Progress, url: str | None, layout: ChosenLayout) -> None:
    """Publish which data is open, and from where the run goes on.

    Args:
        job: the run, restored.
        progress: its counters.
        url: where this rank's metrics are served; None for nowhere.
        layout: of this start.
    """
    assert job.loader.blend is not None
    job.events.publish(
        DataOpened(
            step=progress.step,
            sample=progress.consumed_samples,
            first_step=progress.first_step,
            first_sample=progress.first_sample,
            seed=job.spec.train.seed,
            seq_len=job.spec.data.seq_len,
            sources=job.corpora.described(),
            blend=job.loader.blend.as_json(),
        )
    )
    spec, runtime = job.spec, job.runtime
    job.events.publish(
        RunStarted(
            step=progress.step,
            job=spec.name,
            spec_hash=spec.hash,
            world_size=runtime.world,
            topology=job.topology.as_dict(),
            layout=job.topology.describe(),
            parameters=sum(p.numel() for p in job.parallel_model.meta_model.parameters()),
            steps=spec.train.steps,
            step_tokens=spec.global_batch_tokens,
            device=runtime.device.type,
            launch_id=runtime.launch_id,
            metrics_url=url,
            topology_epoch=progress.topology_epoch,
            spares=layout.spares,
            layout_reason="" if layout.reason == ChosenLayout.reason else layout.reason,
            start_seconds=runtime.start_parts.seconds,
            record=(
                experiment_record(corpus=job.corpora.fingerprint, run_id=progress.run_id)
                if runtime.is_first
                else {}
            ),
            spec=spec.as_dict(),
        )
    )
