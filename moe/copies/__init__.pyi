from .balance import Copies as Copies
from .loan import Lending as Lending
from .loan import Loan as Loan
from .plan import CopyPlan as CopyPlan
from .plan import plan_copies as plan_copies
from .plan import slowest as slowest
