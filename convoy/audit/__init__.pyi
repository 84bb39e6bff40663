from .data import audit_data as audit_data
from .faulty_run import Audit as Audit
from .faulty_run import arrays_that_differ as arrays_that_differ
from .faulty_run import audit as audit
from .replayed import ReplayedStep as ReplayedStep
from .replayed import compare_runs as compare_runs
from .replayed import replay as replay
from .replayed import spec_on_ranks as spec_on_ranks
