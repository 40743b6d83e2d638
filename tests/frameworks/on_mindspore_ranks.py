"""One of the processes of `test_mindspore_distributed.py`: a worker, or who brings them together."""

import json
import os
import sys
from pathlib import Path

import joined
import mindspore as ms
import numpy as np
from mindspore import ops
from mindspore.communication import get_rank, init

out = Path(sys.argv[1])
ms.set_device("CPU")
if os.environ["MS_ROLE"] == "MS_SCHED":
    out.write_text("null")  # it ends in init, when all workers have ended
init()
gather = ops.AllGather()


def reduce(power, p):
    """Σ|g|^p of all processes, for p = inf the largest |g|.

    MindSpore 2.10 on CPUs sends float64 as float32 without a word, and has no maximum; int32 it sends as it is.
    """
    sent = power.asnumpy().reshape(1, -1)
    everyone = gather(ms.Tensor(sent.view(np.int32))).asnumpy().view(np.float64)
    found = everyone.max(0) if p == float("inf") else everyone.sum(0)
    return ms.Tensor(found.reshape(power.shape))


out.write_text(json.dumps(joined.found(get_rank(), ms.Tensor, lambda x: x.asnumpy(), reduce)))
