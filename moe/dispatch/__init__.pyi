from .dispatchers import Dispatcher as Dispatcher
from .dispatchers import DispatchSetup as DispatchSetup
from .dispatchers import LocalDispatcher as LocalDispatcher
from .dispatchers import dispatcher_of as dispatcher_of
