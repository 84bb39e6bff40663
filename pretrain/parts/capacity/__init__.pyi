from .part import CapacityPart as CapacityPart
from .rule import CapacityBalance as CapacityBalance
