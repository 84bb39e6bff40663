from .campaign import DrawnFault as DrawnFault
from .campaign import draw_faults as draw_faults
from .campaign import run_campaign as run_campaign
from .kills import Piece as Piece
from .kills import run_pieces as run_pieces
from .kills import totals as totals
from .machines import Machines as Machines
