from .arithmetic import chunk_length as chunk_length
from .arithmetic import from_fixed as from_fixed
from .sums import ExactSums as ExactSums
from .sums import FixedPointBuffer as FixedPointBuffer
from .unit_sums import UnitSums as UnitSums
