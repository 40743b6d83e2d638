"""A function on several processes that talk through gloo, each with its rank; what one of them raises is raised here."""

import multiprocessing
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

SERVER = multiprocessing.get_context("forkserver")  # imports torch once, before any thread of torch's is there
SERVER.set_forkserver_preload(["torch", "torch.distributed.tensor", "torch.distributed.fsdp", "gradclip.integrations.torch"])
ENDED = 90  # seconds


def on_ranks(size, work, *args, patience=60):
    """What work(rank, *args) returned on each; a collective that not all join ends in an error after `patience` seconds."""
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = zip(*(SERVER.Pipe(duplex=False) for _ in range(size)), strict=True)
        store = str(Path(folder) / "store")
        given = [(work, rank, size, store, patience, theirs[rank], args) for rank in range(size)]
        processes = [SERVER.Process(target=_one, args=each, daemon=True) for each in given]
        for process in processes:
            process.start()
        found = [_told(pipe, rank) for rank, pipe in enumerate(ours)]
        for process in processes:
            process.join(ENDED)
            process.kill()
    failed = [f"rank {rank}:\n{said}" for rank, (fine, said) in enumerate(found) if not fine]
    assert not failed, "\n".join(failed)
    return [said for _, said in found]


def _told(pipe, rank):
    return pipe.recv() if pipe.poll(ENDED) else (False, f"said nothing within {ENDED} seconds")


def _one(work, rank, size, store, patience, pipe, args):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        wait = timedelta(seconds=patience)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=wait)
        said = (True, work(rank, *args))
    except BaseException:
        said = (False, traceback.format_exc())
    pipe.send(said)
    if said[0] and dist.is_initialized():
        dist.destroy_process_group()
