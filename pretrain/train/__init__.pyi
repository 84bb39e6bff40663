from .barrier import Action as Action
from .barrier import Report as Report
from .entry import run as run
from .exclusion import exclude_machine as exclude_machine
from .generation import Generated as Generated
from .generation import generate as generate
from .profile import read_window as read_window
from .trainer import Trainer as Trainer
