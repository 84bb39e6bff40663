from .config import DetectionConfig as DetectionConfig
from .part import OddLosses as OddLosses
from .rule import LossOutlier as LossOutlier
from .rule import LossOutliers as LossOutliers
from .watch import flight_folder as flight_folder
from .watch import watch_ranks as watch_ranks
