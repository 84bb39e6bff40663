from .deep_ep import DeepEPDispatcher as DeepEPDispatcher
from .dispatchers import AllGatherDispatcher as AllGatherDispatcher
from .dispatchers import AllToAllDispatcher as AllToAllDispatcher
from .dispatchers import Dispatcher as Dispatcher
from .dispatchers import LocalDispatcher as LocalDispatcher
from .dispatchers import PaddedAllToAllDispatcher as PaddedAllToAllDispatcher
