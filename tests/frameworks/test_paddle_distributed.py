"""`reduce=` over two processes that talk through gloo, as `paddle.distributed.launch` starts them."""

import joined
from processes import free_ports, told


def test_two_processes_have_one_norm(tmp_path):
    ends = [f"127.0.0.1:{port}" for port in free_ports(2)]
    common = {
        "PADDLE_TRAINERS_NUM": "2",
        "PADDLE_TRAINER_ENDPOINTS": ",".join(ends),
        "PADDLE_MASTER": ends[0],
        "PADDLE_DISTRI_BACKEND": "gloo",
    }
    each = [common | {"PADDLE_TRAINER_ID": str(rank), "PADDLE_CURRENT_ENDPOINT": end} for rank, end in enumerate(ends)]
    joined.right(told("on_paddle_ranks.py", each, tmp_path))
