from .checkpointer import AsyncCheckpointer as AsyncCheckpointer
from .claim import owned as owned
from .messages import SaveEvent as SaveEvent
from .tier import Tier as Tier
from .tier import TierName as TierName
