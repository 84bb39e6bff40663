from .config import DetectionConfig as DetectionConfig
from .part import LossWatch as LossWatch
from .part import flight_folder as flight_folder
from .part import watch_ranks as watch_ranks
from .rule import LossOutlier as LossOutlier
from .rule import LossOutliers as LossOutliers
