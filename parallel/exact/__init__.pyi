from .arithmetic import from_fixed as from_fixed
from .arithmetic import on_loss_grid as on_loss_grid
from .sums import ExactSums as ExactSums
from .sums import FixedPointBuffer as FixedPointBuffer
from .tensor_digest import digest as digest
from .unit_sums import UnitSums as UnitSums
