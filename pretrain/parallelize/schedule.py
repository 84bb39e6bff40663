"""Pipeline schedules: where each stage is, and for how long ranks wait."""

from __future__ import annotations

from parallel import PipelineSchedule


def place_of(stage: int, pp: int, schedule: PipelineSchedule) -> int:
    """Which of ``pp`` places along the pipeline has a stage: one after another, round and round,
    or under ``zbv`` and ``dualpipev`` there and back, so that the first has the last stage too."""
    turn, place = divmod(stage, pp)
    return pp - 1 - place if schedule.folds_into_v and turn % 2 else place


def bubble(
    pp: int,
    stages_per_rank: int,
    micro_batches: int,
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B,
) -> float:
    """The share of a step that ranks wait where all stages and passes take the same time.

    (p - 1) / (v · m + p - 1) for p ranks of v stages and m micro-batches (Narayanan et al., arXiv
    2104.04473, section 2.2, as a share of the whole step).

    Under ``zbv`` and ``dualpipev`` the first rank never waits, nor do others once their first
    micro-batch has come (Qi et al., arXiv 2401.10241, section 6): what is left is that the last
    begins, and ends, p - 1 forwards of a stage later. A rank's step is 6 · m passes of a stage, so
    that is (p - 1) / (6 · m + p - 1), for 2 · p - 1 micro-batches and more, where a backward's two
    passes each take as long as a forward. The more of the weights' gradients are computed in the
    first of them, the less is left to fill the gaps with.
    """
    waits = pp - 1
    passes = 6 * micro_batches if schedule.folds_into_v else stages_per_rank * micro_batches
    return waits / (passes + waits)


def padded_count(
    micro_batches: int, pp: int, stages_per_rank: int, schedule: PipelineSchedule
) -> int:
    """How many micro-batches a schedule takes, that many at least: the interleaved one a multiple
    of the ranks, DualPipeV as many as there are stages."""
    if schedule is PipelineSchedule.DUALPIPEV:
        return max(micro_batches, pp * stages_per_rank)
    if schedule is PipelineSchedule.ONE_F_ONE_B and stages_per_rank > 1:
        return -(-micro_batches // pp) * pp
    return micro_batches
