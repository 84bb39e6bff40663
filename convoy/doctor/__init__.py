"""Known corruptions of mixture-of-experts checkpoints, named from what is in the files."""

from convoy.doctor.check import Check as Check
from convoy.doctor.check import Finding as Finding
from convoy.doctor.examine import CHECKS as CHECKS
from convoy.doctor.examine import examine as examine
from convoy.doctor.examine import total_bytes as total_bytes
from convoy.doctor.opening import open_patient as open_patient
from convoy.doctor.patient import Declared as Declared
from convoy.doctor.patient import Patient as Patient
