from .context_parallel import FullSequence as FullSequence
from .context_parallel import SequenceContext as SequenceContext
from .context_parallel import ShardedSequence as ShardedSequence
from .delayed_weight_grad import PutGrad as PutGrad
from .delayed_weight_grad import WeightGradStore as WeightGradStore
from .document_mask import AttentionCall as AttentionCall
