"""Pipeline schedules: the place of each stage, and the exposed communication (bubble)."""

from __future__ import annotations

from parallel import PipelineSchedule


def place_of(stage: int, pp: int, schedule: PipelineSchedule) -> int:
    """The place along pp of a stage: ``stage`` modulo ``pp``; under ``zbv`` and ``dualpipev`` in a
    V, so that the first place has the first stage and the last."""
    turn, place = divmod(stage, pp)
    return pp - 1 - place if schedule.folds_into_v and turn % 2 else place


def bubble(
    pp: int,
    stages_per_rank: int,
    micro_batches: int,
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B,
) -> float:
    """The share of a step in which a rank waits for other stages, if all stages take equal time.

    (p - 1) / (v · m + p - 1) for p ranks with v stages each and m micro-batches (Narayanan et al.,
    arXiv 2104.04473, section 2.2, as a share of the full step).

    Under ``zbv`` and ``dualpipev`` the first rank never waits, and another rank waits only for its
    first micro-batch (Qi et al., arXiv 2401.10241, section 6): the last rank starts p - 1 forwards
    of a stage later, and ends as much later. A rank's step is 6 · m passes of a stage: for each of
    two stages a forward, the inputs' gradients and the weights' gradients, which are taken as
    equally long. So the share is (p - 1) / (6 · m + p - 1), for 2 · p - 1 micro-batches and more.
    Weight gradients that are not delayed cannot fill gaps: then the measured share is larger.
    """
    idle = pp - 1
    passes = 6 * micro_batches if schedule.folds_into_v else stages_per_rank * micro_batches
    return idle / (passes + idle)


def padded_count(
    micro_batches: int, pp: int, *, stages_per_rank: int, schedule: PipelineSchedule
) -> int:
    """The smallest number of micro-batches that a schedule takes, at least ``micro_batches``.

    Interleaved 1F1B takes a multiple of the ranks, DualPipeV at least the number of stages.
    """
    if schedule is PipelineSchedule.DUALPIPEV:
        return max(micro_batches, pp * stages_per_rank)
    if schedule is PipelineSchedule.ONE_F_ONE_B and stages_per_rank > 1:
        return -(-micro_batches // pp) * pp
    return micro_batches
