from .activation import ACTIVATIONS as ACTIVATIONS
from .by_unit import fork as fork
from .by_unit import single_assignments as single_assignments
from .grouped import GroupedExperts as GroupedExperts
from .weights import ExpertWeights as ExpertWeights
