"""What a run saves: arrays and the manifest's state."""

from __future__ import annotations

import torch

from ckpt import LocalArray, SaveInfo
from pretrain.checkpoint.run_id import save_id
from pretrain.job import Job
from pretrain.observe import code_version
from pretrain.state import Progress, RunState, rng_arrays


def checkpoint_arrays(job: Job) -> list[LocalArray]:
    """This rank's part of what a checkpoint holds, as it is now."""
    rng = rng_arrays(job.topology, job.runtime.rank, job.runtime.device)
    return [*job.arrays(), *job.residuals(), *rng]


def save_info(job: Job, progress: Progress) -> SaveInfo:
    """What else a checkpoint after ``progress.step`` steps holds."""
    spec = job.spec
    return SaveInfo(
        save_id=save_id(job, progress.step, progress.health.go_backs),
        step=progress.step,
        topology=job.topology,
        state=RunState(
            progress=progress,
            corpus=job.corpora.fingerprint,
            tokenizer=job.corpora.tokenizer_fingerprint,
            sources={one.name: one.manifest.fingerprint for one in job.corpora.sources},
            blend=None if job.loader.blend is None else job.loader.blend.as_json(),
            parts={p.name: state for p in job.parts if (state := p.state()) is not None},
            machines=list(job.machines),
            threads=torch.get_num_threads() if spec.train.exact else None,
        ).as_dict()
        | {"code": code_version()},
        spec=spec.as_dict(),
        spec_hash=spec.hash,
        compression=spec.checkpoint.compression,
    )
