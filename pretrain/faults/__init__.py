"""Faults on purpose: what ``[[inject]]`` of the spec does to a run."""

from pretrain.faults.inject import Faults, InjectedFaults, faults_of, forget_faults

__all__ = [
    "Faults",
    "InjectedFaults",
    "faults_of",
    "forget_faults",
]
