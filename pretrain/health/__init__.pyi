from .stragglers_config import StragglersConfig as StragglersConfig
from .verify_config import VerifyConfig as VerifyConfig
