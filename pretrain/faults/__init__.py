"""Faults on purpose: what ``[[inject]]`` of the spec does to a run, and campaigns of faults."""

from pretrain.faults.audit import Audit, Recovery, arrays_that_differ, audit
from pretrain.faults.campaign import DrawnFault, draw_faults, run_campaign
from pretrain.faults.inject import Faults, InjectedFaults, faults_of, forget_faults
from pretrain.faults.machines import Machines, closing

__all__ = [
    "Audit",
    "DrawnFault",
    "Faults",
    "InjectedFaults",
    "Machines",
    "Recovery",
    "arrays_that_differ",
    "audit",
    "closing",
    "draw_faults",
    "faults_of",
    "forget_faults",
    "run_campaign",
]
