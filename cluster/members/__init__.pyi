from .exclude_list import EXCLUDE_LIST as EXCLUDE_LIST
from .exclude_list import exclude as exclude
from .exclude_list import node_name as node_name
from .exclude_list import read_exclusions as read_exclusions
from .rendezvous import convoy_rendezvous as convoy_rendezvous
