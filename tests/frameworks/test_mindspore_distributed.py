"""`reduce=` over two processes on CPUs, as `msrun` starts them: two workers and a scheduler."""

import joined
from processes import free_ports, told


def test_two_processes_have_one_norm(tmp_path):
    common = {"MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(free_ports(1)[0])}
    each = [common | {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(rank)} for rank in range(2)]
    *workers, _ = told("on_mindspore_ranks.py", [*each, common | {"MS_ROLE": "MS_SCHED"}], tmp_path)
    joined.right(workers)
