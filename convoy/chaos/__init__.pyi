from .campaign import DrawnFault as DrawnFault
from .campaign import draw_faults as draw_faults
from .campaign import run_campaign as run_campaign
from .machines import Machines as Machines
