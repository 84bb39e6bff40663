from .layout import ChosenLayout as ChosenLayout
from .layout import choose_layout as choose_layout
from .layout import launched_layout as launched_layout
from .spares import stand_by as stand_by
from .spares import with_spares as with_spares
from .warm import with_warm_restarts as with_warm_restarts
