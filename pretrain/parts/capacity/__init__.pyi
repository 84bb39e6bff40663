from .rule import CapacityBalance as CapacityBalance
