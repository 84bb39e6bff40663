from .config import StragglersConfig as StragglersConfig
from .part import StragglersPart as StragglersPart
from .rule import GainMeter as GainMeter
from .rule import Straggler as Straggler
from .rule import Stragglers as Stragglers
