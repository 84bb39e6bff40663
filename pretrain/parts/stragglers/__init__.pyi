from .part import StragglerStages as StragglerStages
from .rule import GainMeter as GainMeter
from .rule import Straggler as Straggler
from .rule import Stragglers as Stragglers
from .rule import StragglersConfig as StragglersConfig
