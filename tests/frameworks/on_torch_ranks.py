"""What each rank does in `test_torch_distributed.py`: training, errors, state. They all run the same function."""

import contextlib
import copy
import time
from math import inf, nan

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import gradclip
from gradclip import Groups, MaxNorm, MaxRms, Median, NonFiniteError, Ratio
from gradclip.integrations.torch import Layout, attach, clip_grad_norm_

LIMIT = 0.3
MICRO = 4


def raised(kind, work):
    try:
        work()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def close(found, want, within=1e-6):
    assert abs(float(found) - float(want)) <= within * abs(float(want)), (float(found), float(want))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def batch(step):
    draw = torch.Generator().manual_seed(step)
    return torch.randn(8 * MICRO, 5, generator=draw), 4 * torch.randn(8 * MICRO, 3, generator=draw)


def losses(net, step, rank, size, micro):
    """Of each micro-batch its part here; their mean over all is the mean over the batch."""
    for x, y in zip(*(each.chunk(micro) for each in batch(step)), strict=True):
        here = [each.chunk(size)[rank] for each in (x, y)]
        yield nn.functional.mse_loss(net(here[0]), here[1]) / micro


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def by_hand(make, steps, limit=LIMIT):
    """One process, the whole batch, clipped by hand in float64."""
    net = model()
    optimizer = make(net.parameters())
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        sum(losses(net, step, 0, 1, 1)).backward()
        grads = [p.grad for p in net.parameters()]
        norms.append(float(torch.cat([g.double().ravel() for g in grads]).norm()))
        for grad in grads:
            grad.mul_(min(1.0, limit / norms[-1]))
        optimizer.step()
    return net, norms


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adam(params):
    return torch.optim.AdamW(params, lr=0.01, fused=True)


def same_weights(net, want):
    for ours, theirs in zip(net.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(whole(ours).detach(), theirs.detach(), rtol=2e-5, atol=2e-6)


def same_bits(value):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    assert len(set(map(repr, everyone))) == 1, everyone


def wrapped(how):
    net = model()
    if how == "DDP":
        return DistributedDataParallel(net)
    for layer in (net[0], net[2]):
        fully_shard(layer)
    return fully_shard(net)


def unsynced(net, last):
    """All micro-batches but the last stay on their rank."""
    if isinstance(net, DistributedDataParallel):
        return contextlib.nullcontext() if last else net.no_sync()
    net.set_requires_gradient_sync(last)
    return contextlib.nullcontext()


def trains(rank, how, accumulates, scales, fused):
    """As on one process: norms to 1e-5, weights, counts, and the same bits on all ranks."""
    make, micro = adam if fused else sgd, MICRO if accumulates else 1
    want, norms = by_hand(make, 6)
    net = wrapped(how)
    optimizer = make(net.parameters())
    attached = attach(optimizer, MaxNorm(LIMIT), named_parameters=net.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scales)
    for step, norm in enumerate(norms):
        optimizer.zero_grad()
        for i in range(micro):
            with unsynced(net, i == micro - 1):
                loss = list(losses(net, step, rank, dist.get_world_size(), micro))[i]
                scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        close(attached.last.norm, norm, 1e-5)
        same_bits(float(attached.last.norm).hex())
    assert attached.counts.steps == attached.counts.clipped == len(norms)
    same_weights(net, want)


def a_scaler_leaves_the_step_out_on_all(rank, fused):
    """An inf that one rank has: no rank steps, and none counts."""
    net = wrapped("FSDP2")
    optimizer = (adam if fused else sgd)(net.parameters())
    attached = attach(optimizer, Median(2.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [whole(p).detach().clone() for p in net.parameters()]
    for bad in (True, False):
        optimizer.zero_grad()
        scaler.scale(sum(losses(net, 0, rank, dist.get_world_size(), 1))).backward()
        if bad and rank == 1:
            next(net.parameters()).grad.to_local()[0] = inf
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(whole(p), x) for p, x in zip(net.parameters(), before, strict=True))
        assert moved is not bad
        assert attached.counts.steps == (0 if bad else 1)
        assert scaler.get_scale() == 2.0
        same_bits(attached.state_dict())


def spread(mesh, seed, shape, *placements):
    values = torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()
    return distribute_tensor(values, mesh, placements or [Shard(0)], src_data_rank=None)


def parameter(grad):
    p = nn.Parameter(grad.detach().clone())
    p.grad = grad
    return p


def line():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def named(count=3):
    mesh = line()
    return {f"w{i}": parameter(spread(mesh, i, (5, 4))) for i in range(count)}


def truth(params, p=2):
    flat = torch.cat([whole(x.grad).double().ravel() for x in params.values()])
    return float(torch.linalg.vector_norm(flat, p))


def attached_to(params, rule, **options):
    optimizer = torch.optim.SGD(params.values(), lr=1.0, momentum=0.9)
    return optimizer, attach(optimizer, rule, named_parameters=params.items(), **options)


def partial_gradients_are_added_up_first(rank):
    mesh, size = line(), dist.get_world_size()
    parts = [torch.full((3, 2), 1.0 + other) for other in range(size)]
    params = named(2)
    for i in range(3):
        grad = DTensor.from_local(parts[rank].clone(), mesh, [Partial()], run_check=False)
        p = nn.Parameter(DTensor.from_local(parts[0].clone(), mesh, [Replicate()], run_check=False))
        p.grad = grad
        params[f"partial{i}"] = p
    want = truth(params)
    optimizer, attached = attached_to(params, MaxNorm(1.0))
    with CommDebugMode() as counting:
        optimizer.step()
    close(attached.last.norm, want)
    close(truth(params), 1.0)
    assert counting.get_total_counts() == 2, counting.get_comm_counts()  # one for the three, one for the norm


def not_finite_is_told_by_all(rank, p):
    """Also where this rank's own part is finite; nothing is written anywhere."""
    params, bad = named(), dist.get_world_size() // 2  # the last that has a row, of five
    if rank == bad:
        params["w1"].grad.to_local()[0, 0] = nan
    before = [p.grad.to_local().clone() for p in params.values()]
    optimizer, attached = attached_to(params, MaxNorm(1.0), p=p)
    said = raised(NonFiniteError, optimizer.step)
    assert f"rank {bad}: " in said, said
    assert "w1 (1 NaN" in said, said
    assert all(
        torch.equal(p.grad.to_local().nan_to_num(), x.nan_to_num()) for p, x in zip(params.values(), before, strict=True)
    )
    said = raised(NonFiniteError, lambda: clip_grad_norm_(params.values(), 1.0, p, error_if_nonfinite=True))
    assert said.startswith("The total norm of order"), said
    assert "parameter 1" in said, said
    assert "rank" in said, said
    assert attached.counts.steps == 0


def skip_is_of_all(rank, rule):
    params = named()
    if rank == 0:
        params["w1"].grad.to_local()[0, 0] = nan if rule is None else 1e6
    before = [p.detach().to_local().clone() for p in params.values()]
    optimizer, attached = attached_to(params, rule or MaxNorm(1.0), nonfinite="skip")
    optimizer.step()
    assert attached.counts.skipped == 1
    assert not optimizer.state
    assert all(torch.equal(p.detach().to_local(), x) for p, x in zip(params.values(), before, strict=True))


def a_rule_knows_the_same_on_all_and_is_saved(rank, folder):
    """torch.distributed.checkpoint keeps it, and a resumed run is the uninterrupted one."""
    import torch.distributed.checkpoint as checkpoint

    def steps(params, optimizer, attached, first, last):
        for step in range(first, last):
            for i, p in enumerate(params.values()):
                p.grad = spread(line(), 100 * step + i, (5, 4)) * (20 if step == 7 else 1)
            optimizer.step()
        same_bits(attached.state_dict())

    params = named()
    optimizer, attached = attached_to(params, Median(1.0, window=4, warmup=2))
    steps(params, optimizer, attached, 0, 5)
    checkpoint.save({"clip": attached}, checkpoint_id=folder)
    other_params = {name: nn.Parameter(p.detach().clone()) for name, p in params.items()}
    other_optimizer, other = attached_to(other_params, Median(1.0, window=4, warmup=2))
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    checkpoint.load({"clip": other}, checkpoint_id=folder)
    assert other.state_dict() == attached.state_dict()
    steps(params, optimizer, attached, 5, 9)
    steps(other_params, other_optimizer, other, 5, 9)
    assert attached.counts.clipped > 1
    assert other.state_dict() == attached.state_dict()
    assert all(torch.equal(whole(p), whole(q)) for p, q in zip(params.values(), other_params.values(), strict=True))


def each_tensor_by_its_own(rank):
    """The norm of every whole tensor in one collective."""
    params = named()
    want = [float(whole(p.grad).double().norm()) for p in params.values()]
    optimizer, attached = attached_to(params, MaxNorm(1.0), scope="tensor")
    with CommDebugMode() as counting:
        optimizer.step()
    for found, norm in zip(attached.last.norm.tolist(), want, strict=True):
        close(found, norm)
    assert counting.get_total_counts() == 1
    for p in params.values():
        close(whole(p.grad).norm(), 1.0, 1e-5)


def against_whole_weights(rank):
    params = named()
    grads = {name: whole(p.grad).clone() for name, p in params.items()}
    weights = {name: whole(p).detach().clone() for name, p in params.items()}
    optimizer, _ = attached_to(params, Ratio(0.1), scope="tensor")
    optimizer.step()
    want = gradclip.clip(grads, Ratio(0.1), scope="tensor", weights=weights).grads
    for name, p in params.items():
        torch.testing.assert_close(whole(p.grad), want[name], rtol=1e-6, atol=0)


def units_of_parts_are_refused(rank):
    optimizer, _ = attached_to(named(), Ratio(0.1), scope="unit")
    said = raised(Exception, optimizer.step)
    assert "unit" in said, said
    assert "parts of tensors" in said, said


def plain_beside_spread_has_to_be_declared(rank):
    params = named(1) | {"bias": parameter(torch.ones(3))}
    for work in (attached_to(params, MaxNorm(1.0))[0].step, lambda: clip_grad_norm_(params.values(), 1.0)):
        said = raised(ValueError, work)
        assert "layout=Layout(pieces=1)" in said, said
    params = named(1) | {"bias": parameter(torch.ones(3))}
    want = truth(params)
    optimizer, attached = attached_to(params, MaxNorm(1.0), layout=Layout(pieces=1))
    optimizer.step()
    close(attached.last.norm, want)


def plain_alone_is_nobody_elses_business(rank):
    """A call on one rank needs no other."""
    if rank == 0:
        params = {"bias": parameter(torch.ones(4))}
        with CommDebugMode() as counting:
            close(clip_grad_norm_(params.values(), 1.0), 2.0)
            optimizer, attached = attached_to(params, MaxNorm(0.5))
            optimizer.step()
        assert counting.get_total_counts() == 0
        assert attached.counts.clipped == 1


def a_clip_of_one_rank_ends_in_an_error(rank):
    """Others do not join: within the group's timeout, not never."""
    params = named()
    if rank == 0:
        began = time.monotonic()
        raised(Exception, lambda: clip_grad_norm_(params.values(), 1.0))
        assert time.monotonic() - began < 30
    else:
        time.sleep(8)


def the_functions_of_the_core(rank):
    """DTensors given to norm, clip and clip_; reduce= would count them twice."""
    params = named()
    grads, want = {name: p.grad for name, p in params.items()}, truth(params)
    for p in (1, 2, 3, inf):
        with CommDebugMode() as counting:
            found = gradclip.norm(grads, p=p)
        close(found, truth(params, p))
        assert counting.get_total_counts() == 1
    said = raised(ValueError, lambda: gradclip.clip(grads, MaxNorm(1.0), reduce=lambda power, p: power))
    assert "reduce=" in said, said
    clipped = gradclip.clip(grads, MaxNorm(1.0))
    assert isinstance(clipped.grads["w0"], DTensor)
    close(torch.cat([whole(x).ravel() for x in clipped.grads.values()]).norm(), 1.0)
    close(truth(params), want)
    close(gradclip.clip_(grads, MaxNorm(1.0)).norm, want)
    close(truth(params), 1.0)


def diagnosed(params, **layout):
    """The norm of one step and what was found, in one collective."""
    import warnings

    optimizer, attached = attached_to(params, MaxNorm(1.0), layout=Layout(diagnose=True, **layout))
    with CommDebugMode() as counting, warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        optimizer.step()
    assert counting.get_total_counts() == 1, counting.get_comm_counts()
    return attached, " ".join(str(each.message) for each in heard)


def diagnoses(rank):
    size = dist.get_world_size()
    fine = {f"w{i}": parameter(torch.full((3,), 1.0 + i)) for i in range(3)}
    attached, heard = diagnosed(fine)
    assert str(attached.report) == "all processes fit together", attached.report
    assert not heard

    unreduced = {"w": parameter(torch.full((3,), 1.0 + rank))}  # a clip inside of no_sync
    attached, heard = diagnosed(unreduced)
    assert attached.report.disagree == list(range(size))
    assert "no_sync()" in heard

    stages = {f"stage{rank}.w": parameter(torch.full((3,), 2.0))}
    attached, heard = diagnosed(stages)
    assert attached.report.strangers == list(range(1, size))
    assert "Declare them" in heard
    stages = {f"stage{rank}.w": parameter(torch.full((3,), 2.0))}
    attached, heard = diagnosed(stages, pieces=size)
    close(attached.last.norm, 2 * (3 * size) ** 0.5)
    assert not heard

    lacking = named()
    if rank == 1:
        lacking["w2"].grad = None
    attached, heard = diagnosed(lacking)
    assert attached.report.missing == {1: 1}
    assert "gradients are missing, by rank: {1: 1}" in heard


def ranks_without_any_gradient_join(rank):
    params = named()
    want = truth(params)
    if rank == 1:
        mine = sum(float(p.grad.to_local().double().square().sum()) for p in params.values())
        for p in params.values():
            p.grad = None
    else:
        mine = 0.0
    lost = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(lost)
    optimizer, attached = attached_to(params, MaxNorm(1.0))
    for _ in range(2):
        with CommDebugMode() as counting:
            optimizer.step()
        assert counting.get_total_counts() == 1
    close(attached.last.norm, 1.0, 1e-5)
    assert attached.counts.steps == 2
    first = (want**2 - float(lost)) ** 0.5
    assert first > 1.0


def declared_experts_train(rank):
    """Plain experts on every rank beside what is sharded: the norm is that of all."""
    size = dist.get_world_size()
    params = named(2) | {f"experts.{rank}.w": parameter(torch.full((4,), 1.0 + rank))}
    want = (truth(named(2)) ** 2 + sum(4 * (1.0 + other) ** 2 for other in range(size))) ** 0.5
    optimizer, attached = attached_to(params, MaxNorm(1.0), layout=Layout(pieces={"experts.*": size, "*": 1}))
    optimizer.step()
    close(attached.last.norm, want)
    same_bits(float(attached.last.norm).hex())
    optimizer, _ = attached_to(params, MaxNorm(1.0), scope="tensor", layout=Layout(pieces={"experts.*": size, "*": 1}))
    said = raised(ValueError, optimizer.step)
    assert "different tensors" in said, said


def stages_are_grouped(rank):
    """A pattern may fit a stage's tensors alone; the first stage lacks its gradient in the second step."""
    size = dist.get_world_size()
    params = {f"stages.{rank}.w": parameter(torch.full((4,), 3.0 + rank)), f"stages.{rank}.b": parameter(torch.full((2,), 1.0))}
    rule = Groups({"stages.0.w": MaxNorm(1.0), "*.w": Median(warmup=1), "*.b": None})
    optimizer, attached = attached_to(params, rule, layout=Layout(pieces={"*": size}))
    optimizer.step()
    others = sum(4 * (3.0 + other) ** 2 for other in range(1, size)) ** 0.5
    assert attached.last.norm.tolist() == pytest.approx([6.0, others, 0.0])
    want = 0.5 if rank == 0 else 3.0 + rank
    assert params[f"stages.{rank}.w"].grad.tolist() == pytest.approx([want] * 4)
    same_bits(str(attached.last.norm.tolist()))
    if rank == 0:
        params["stages.0.w"].grad = None
    else:
        params[f"stages.{rank}.w"].grad *= 100
    optimizer.step()
    assert attached.last.norm.tolist() == pytest.approx([0.0, 100 * others, 0.0])
    assert attached.last.coef.tolist()[0] == 1
    assert attached.last.coef.tolist()[1] < 0.1
    for sized, scope in (
        (MaxRms(1.0), "global"),
        (MaxNorm(1.0), "tensor"),
        (Groups({"*": MaxNorm(1.0)}, budget="size"), "global"),
    ):
        everywhere = Layout(pieces={"*": size}).over(params)
        said = raised(ValueError, lambda: gradclip.clip_(everywhere.gradients(), sized, scope=scope))  # noqa: B023
        assert "different tensors" in said, said
    said = raised(ValueError, lambda: gradclip.norm(everywhere.gradients(), scope="tensor"))
    assert "different tensors" in said, said


def cold(rank, count=1000):
    """Seconds of a first call over many FSDP2 parameters, ours and torch's; and after the set of gradients has changed."""
    mesh = line()
    ours = [parameter(spread(mesh, i, (8, 2 + i % 50))) for i in range(count)]  # of fifty shapes
    theirs = [parameter(p.grad.clone()) for p in ours]
    took = []
    for missing in (0, 7):
        for params in (ours, theirs):
            for p in params[:missing]:
                p.grad = None
        for params, call in ((ours, clip_grad_norm_), (theirs, torch.nn.utils.clip_grad_norm_)):
            dist.barrier()
            began = time.perf_counter()
            norm = call(params, 1.0)
            took.append(time.perf_counter() - began)
            close(whole(norm), whole(norm))
    return took
