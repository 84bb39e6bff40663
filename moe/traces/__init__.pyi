from .file import RoutingTrace as RoutingTrace
from .file import read_trace as read_trace
from .file import write_trace as write_trace
from .recorder import RoutingRecorder as RoutingRecorder
