"""`attach` in the loops that people write: each against the same loop with the clip written by hand."""

import copy
import json
import math
import pickle
import warnings
from functools import partial
from math import inf, nan

import pytest
import torch
from torch import nn

import gradclip
from gradclip import Both, Bounds, EmaRatio, Groups, MaxNorm, Median, NonFiniteError, Ratio, Skip, ZScore
from gradclip.integrations.torch import Attached, attach, units

OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": partial(torch.optim.Adam, lr=0.05, foreach=False),
    "Adam foreach": partial(torch.optim.Adam, lr=0.05, foreach=True),
    "AdamW fused": partial(torch.optim.AdamW, lr=0.05, fused=True),
    "SGD fused": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "Adagrad fused": partial(torch.optim.Adagrad, lr=0.1, fused=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
}
FUSED = [name for name in OPTIMIZERS if "fused" in name]
X = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
Y = 20 * X.sum(1, keepdim=True)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(model, x=X, y=Y):
    return ((model(x) - y) ** 2).mean()


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def grads(model):
    return [p.grad for p in model.parameters()]


def same(a, b, folded=False):
    """Bit for bit; where the optimizer divides instead of a product, to the last digits."""
    return torch.allclose(weights(a), weights(b), rtol=2e-5, atol=1e-6) if folded else torch.equal(weights(a), weights(b))


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_plain_loop(name, set_to_none, fold):
    ours, theirs = network(), network()
    a, b = OPTIMIZERS[name](ours.parameters()), OPTIMIZERS[name](theirs.parameters())
    attached = attach(a, MaxNorm(0.5), fold=fold)
    norms = []
    for _ in range(15):
        a.zero_grad(set_to_none)
        loss_of(ours).backward()
        a.step()
        b.zero_grad(set_to_none)
        loss_of(theirs).backward()
        norms.append(float(gradclip.clip_(grads(theirs), MaxNorm(0.5)).norm))
        b.step()
        assert float(attached.last.norm) == pytest.approx(norms[-1], rel=1e-4)
    assert same(ours, theirs, folded=fold and name in FUSED)
    assert attached.counts == (15, 15, 0, 0)
    assert float(gradclip.norm(grads(ours))) == pytest.approx(0.5, rel=1e-6)
    assert not hasattr(a, "grad_scale")


@pytest.mark.parametrize("name", ["SGD", "AdamW fused"])
@pytest.mark.parametrize("rule", [MaxNorm(2.0), Bounds(-0.1, 0.3)])
@pytest.mark.parametrize("scope", ["tensor", "element", None])
def test_every_scope(name, rule, scope):
    if scope not in (None, *rule.allowed_scopes()):
        return
    ours, theirs = network(), network()
    a, b = OPTIMIZERS[name](ours.parameters()), OPTIMIZERS[name](theirs.parameters())
    attach(a, rule, scope=scope)
    for _ in range(5):
        for model, optimizer in ((ours, a), (theirs, b)):
            optimizer.zero_grad()
            loss_of(model).backward()
            if model is theirs:
                gradclip.clip_(grads(theirs), rule, scope=scope)
            optimizer.step()
    assert same(ours, theirs, folded=name in FUSED)


def test_accumulation_clips_the_sum_once():
    ours, theirs = network(), network()
    a, b = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs))
    attached = attach(a, MaxNorm(0.5))
    for _ in range(6):
        for part, target in zip(X.chunk(4), Y.chunk(4), strict=True):
            (loss_of(ours, part, target) / 4).backward()
        a.step()
        a.zero_grad()
        loss_of(theirs).backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        b.step()
        b.zero_grad()
    assert attached.counts.steps == 6
    assert torch.allclose(weights(ours), weights(theirs), rtol=1e-5, atol=1e-6)


def test_one_norm_over_all_groups():
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [a]}, {"params": [b], "lr": 2.0}], lr=1.0)
    attached = attach(optimizer, MaxNorm(1.0))
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([4.0])
    optimizer.step()
    assert float(attached.last.norm) == 5
    assert (a.item(), b.item()) == (pytest.approx(-0.6), pytest.approx(-1.6))


def test_two_optimizers_and_stale_gradients():
    a, b, frozen = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    frozen.requires_grad_(False)
    first, second = torch.optim.SGD([a, frozen], lr=1.0), torch.optim.SGD([b], lr=1.0)
    clips = attach(first, MaxNorm(1.0)), attach(second, MaxNorm(10.0))
    a.grad, b.grad = torch.tensor([2.0]), torch.tensor([1000.0])  # b's is left from long ago
    first.step()
    assert a.item() == -1
    assert b.grad.item() == 1000
    second.step()
    assert b.item() == pytest.approx(-10)
    assert [float(clip.last.norm) for clip in clips] == [2, 1000]


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_grad_scaler(name, fold, unscale):
    """Clipped after unscaling; the scale does not show in the norm, and a step with inf does not reach the clip."""
    ours, theirs = network(), network()
    a, b = OPTIMIZERS[name](ours.parameters()), OPTIMIZERS[name](theirs.parameters())
    attached = attach(a, MaxNorm(0.5), fold=fold, named_parameters=ours.named_parameters())
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3) for _ in range(2)]
    for i in range(12):
        for model, optimizer, scaler in ((ours, a, scalers[0]), (theirs, b, scalers[1])):
            optimizer.zero_grad()
            loss = loss_of(model) * (inf if i in (4, 5) else 1.0)
            scaler.scale(loss).backward()
            if model is theirs:
                scaler.unscale_(optimizer)
                gradclip.clip_(grads(model), MaxNorm(0.5), nonfinite="keep")
            elif unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        if i in (4, 5):
            assert attached.counts.steps == 4
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert attached.counts == (10, 10, 0, 0)
    assert same(ours, theirs, folded=name in FUSED)
    assert float(gradclip.norm(grads(ours))) == pytest.approx(0.5, rel=1e-5)
    assert not hasattr(a, "grad_scale")
    assert not hasattr(a, "found_inf")


@pytest.mark.parametrize("name", FUSED)
def test_the_norm_under_a_scaler_is_that_of_the_unscaled_gradient(name):
    p = nn.Parameter(torch.zeros(2))
    optimizer = OPTIMIZERS[name]([p])
    attached = attach(optimizer, MaxNorm(100.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((p * torch.tensor([3.0, 4.0])).sum()).backward()
    scaler.step(optimizer)
    assert float(attached.last.norm) == 5
    assert not attached.last.clipped
    assert p.grad.tolist() == [3, 4]


@pytest.mark.parametrize("fold", [True, False])
def test_a_scale_that_the_user_has_set_stays(fold):
    p = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([p], lr=1.0, fused=True)
    attached = attach(optimizer, MaxNorm(1.0), fold=fold)
    optimizer.grad_scale = torch.tensor(8.0)
    for _ in range(2):
        p.grad = torch.tensor([24.0, 32.0])
        optimizer.step()
        assert float(attached.last.norm) == 5
        assert optimizer.grad_scale.item() == 8
    assert p.tolist() == pytest.approx([-1.2, -1.6])
    p.grad = torch.tensor([24.0, nan])
    with pytest.raises(NonFiniteError):
        optimizer.step()
    assert p.grad[0].item() == 24


def test_what_is_not_clipped_is_not_scaled():
    p = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([p], lr=1.0, fused=True)
    attach(optimizer, MaxNorm(10.0))
    p.grad = torch.tensor([0.1, 0.7])
    before = p.grad.clone()
    version = p.grad._version
    optimizer.step()
    assert torch.equal(p.grad, before)
    assert p.grad._version == version
    assert torch.equal(p.detach(), -before)


def test_a_folded_coefficient_is_within_a_unit_of_the_product():
    g = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    found = []
    for fold in (True, False):
        p = nn.Parameter(torch.zeros(1000))
        optimizer = torch.optim.SGD([p], lr=1.0, fused=True)
        attach(optimizer, MaxNorm(0.7), fold=fold)
        p.grad = g.clone()
        optimizer.step()
        found.append(p.grad)
    exact = (g.double() * (0.7 / g.double().norm())).float()
    assert torch.equal(found[1], exact)
    units = (found[0].view(torch.int32) - exact.view(torch.int32)).abs()
    assert units.max() == 1


def test_gradients_of_float64_are_not_folded():
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = torch.optim.AdamW([p], fused=True)
    attach(optimizer, MaxNorm(0.7))
    p.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    optimizer.step()
    assert p.grad.tolist() == pytest.approx([0.42, 0.56], rel=1e-15)


def test_lbfgs_clips_after_each_evaluation():
    seen = []

    def run(clipping):
        p = nn.Parameter(torch.tensor([400.0, -300.0]))
        optimizer = torch.optim.LBFGS([p], lr=0.1, max_iter=5)
        attached = attach(optimizer, MaxNorm(1.0)) if clipping == "attached" else None

        def closure():
            optimizer.zero_grad()
            loss = (p**2).sum()
            loss.backward()
            if clipping == "by hand":
                seen.append(float(gradclip.clip_([p.grad], MaxNorm(1.0)).norm))
            return loss

        for _ in range(3):
            loss = optimizer.step(closure)
        return p, attached, loss

    (a, attached, loss), (b, _, want) = run("attached"), run("by hand")
    assert torch.equal(a, b)
    assert torch.equal(loss, want)
    assert attached.counts.steps == len(seen) > 3


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_closures(name, by_name):
    ours, theirs = network(), network()
    a, b = OPTIMIZERS[name](ours.parameters()), OPTIMIZERS[name](theirs.parameters())
    attached = attach(a, MaxNorm(0.5))

    def closure(model, optimizer):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    for _ in range(5):
        once = partial(closure, ours, a)
        loss = a.step(closure=once) if by_name else a.step(once)
        want = closure(theirs, b)
        gradclip.clip_(grads(theirs), MaxNorm(0.5))
        b.step()
    assert loss.item() == pytest.approx(want.item(), rel=1e-4)
    assert same(ours, theirs, folded=name in FUSED)
    assert attached.counts.steps == 5


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("closure", [False, True])
def test_skip_changes_neither_parameters_nor_state(name, closure):
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
    optimizer = OPTIMIZERS[name]([p, q])
    attached = attach(optimizer, MaxNorm(1.0), nonfinite="skip")
    p.grad, q.grad = torch.tensor([3.0, 4.0]), torch.tensor([1.0])
    optimizer.step()
    before = copy.deepcopy((p, q, optimizer.state_dict()))
    bad = torch.tensor([nan, 1.0]), torch.tensor([1.0])

    def evaluate():
        p.grad, q.grad = bad
        return torch.tensor(1.0)

    if closure:
        optimizer.step(evaluate)
    else:
        evaluate()
        optimizer.step()
    assert torch.equal(p, before[0])
    assert torch.equal(q, before[1])
    assert_equal(optimizer.state_dict(), before[2])
    assert p.grad is bad[0]
    assert q.grad is bad[1]
    assert attached.counts == (2, 1, 1, 1)
    p.grad, q.grad = torch.tensor([3.0, 4.0]), torch.tensor([1.0])
    optimizer.step()
    assert not torch.equal(p, before[0])


def assert_equal(a, b):
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list):
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_zero_and_keep():
    for policy, want in (("zero", 1.0), ("keep", nan)):
        p = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([p], lr=1.0, fused=True)
        attached = attach(optimizer, MaxNorm(1.0), nonfinite=policy)
        p.grad = torch.tensor([nan])
        optimizer.step()
        assert math.isnan(p.item()) if math.isnan(want) else p.item() == want
        assert attached.counts == (1, 1, 0, 1)


def test_an_error_names_parameters_and_changes_nothing():
    model = network()
    cases = {
        "0.weight": lambda: (list(model.parameters()), model.named_parameters()),
        "2.bias": lambda: (model.named_parameters(), None),
        r"param_groups\[0\].params\[3\]": lambda: (model.parameters(), None),
    }
    for name, make in cases.items():
        given, named = make()
        optimizer = torch.optim.Adam(given)
        attached = attach(optimizer, MaxNorm(1.0), named_parameters=named)
        before = weights(model)
        loss_of(model).backward()
        (model[0].weight if name == "0.weight" else model[2].bias).grad[0] = nan
        with pytest.raises(NonFiniteError, match=f"not finite: {name} "):
            optimizer.step()
        assert torch.equal(weights(model), before)
        assert attached.counts.steps == 0
        assert not optimizer.state
        model.zero_grad()


def test_low_precision_and_mixed_types():
    for dtype in (torch.bfloat16, torch.float16):
        p, q = nn.Parameter(torch.zeros(2, dtype=dtype)), nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([p, q], lr=1.0)
        attached = attach(optimizer, MaxNorm(1.3))
        p.grad, q.grad = torch.tensor([3.0, 4.0], dtype=dtype), torch.tensor([12.0])
        optimizer.step()
        assert float(attached.last.norm) == 13
        assert p.grad.tolist() == pytest.approx([0.3, 0.4], rel=1e-2)
        assert q.grad.item() == pytest.approx(1.2)


def test_sparse_embeddings():
    ours, theirs = (nn.Embedding(10, 3, sparse=True) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    a, b = torch.optim.SparseAdam(ours.parameters()), torch.optim.SparseAdam(theirs.parameters())
    attached = attach(a, MaxNorm(0.5))
    index = torch.tensor([1, 1, 4])
    for _ in range(3):
        for model, optimizer in ((ours, a), (theirs, b)):
            optimizer.zero_grad()
            model(index).pow(2).sum().backward()
            if model is theirs:
                dense = model.weight.grad.to_dense()
                model.weight.grad = (dense * min(1, 0.5 / dense.norm().item())).to_sparse(1)
            optimizer.step()
    assert torch.allclose(ours.weight, theirs.weight, atol=1e-6)
    assert attached.counts.steps == 3


def test_a_group_that_is_added_later():
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([a], lr=1.0)
    attached = attach(optimizer, MaxNorm(1.0), scope="tensor")
    a.grad = torch.tensor([3.0])
    optimizer.step()
    assert attached.last.to_dict()["norm"] == {"param_groups[0].params[0]": 3.0}
    optimizer.add_param_group({"params": [b]})
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([4.0])
    optimizer.step()
    assert attached.last.to_dict()["norm"] == {"param_groups[0].params[0]": 3.0, "param_groups[1].params[0]": 4.0}


def test_a_compiled_model():
    ours, theirs = network(), network()
    a, b = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs))
    attach(a, MaxNorm(0.5))
    compiled = torch.compile(ours, backend="aot_eager")
    for _ in range(3):
        a.zero_grad()
        loss_of(compiled).backward()
        a.step()
        b.zero_grad()
        loss_of(theirs).backward()
        gradclip.clip_(grads(theirs), MaxNorm(0.5))
        b.step()
    assert torch.allclose(weights(ours), weights(theirs), rtol=1e-5, atol=1e-6)


def test_state_is_saved_and_goes_on():
    p = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=1.0)
    attached = attach(optimizer, MaxNorm(lambda step: 10.0 - step))
    for _ in range(3):
        p.grad = torch.tensor([100.0])
        optimizer.step()
    saved = json.loads(json.dumps(attached.state_dict()))
    q = nn.Parameter(torch.zeros(1))
    other = torch.optim.SGD([q], lr=1.0)
    resumed = attach(other, MaxNorm(lambda step: 10.0 - step))
    resumed.load_state_dict(saved)
    q.grad = torch.tensor([100.0])
    other.step()
    assert float(resumed.last.limit) == 7
    assert resumed.counts.steps == 4


def test_the_rule_may_be_replaced():
    p = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=1.0)
    attached = attach(optimizer, MaxNorm(1.0))
    attached.clipper.rule = MaxNorm(2.0)
    p.grad = torch.tensor([5.0])
    optimizer.step()
    assert p.item() == -2


def test_copies_lose_the_hooks():
    """torch copies an optimizer without its hooks: attach again."""
    p = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=1.0)
    attach(optimizer, MaxNorm(1.0))
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        (q,) = other.param_groups[0]["params"]
        q.grad = torch.tensor([5.0])
        other.step()
        assert q.item() == -5
        attach(other, MaxNorm(1.0))
        q.grad = torch.tensor([5.0])
        other.step()
        assert q.item() == -6


def test_attaching_twice_and_detaching():
    p = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=1.0)
    attached = attach(optimizer, MaxNorm(1.0))
    assert isinstance(attached, Attached)
    with pytest.raises(ValueError, match="clips already"):
        attach(optimizer, MaxNorm(2.0))
    attached.detach()
    p.grad = torch.tensor([5.0])
    optimizer.step()
    assert p.item() == -5
    attach(optimizer, MaxNorm(2.0))
    optimizer.step()
    assert p.item() == -7


class Wrapper(torch.optim.Optimizer):
    """As some libraries wrap one: without the hooks of its base."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_what_is_no_optimizer_is_refused():
    p = nn.Parameter(torch.zeros(1))
    inner = torch.optim.SGD([p], lr=1.0)
    with pytest.raises(TypeError, match=r"got Wrapper; it wraps one: pass its \.optimizer"):
        attach(Wrapper(inner), MaxNorm(1.0))
    with pytest.raises(TypeError, match="got list"):
        attach([p], MaxNorm(1.0))
    with pytest.raises(ValueError, match="a step of LBFGS cannot be left out"):
        attach(torch.optim.LBFGS([p]), MaxNorm(1.0), nonfinite="skip")
    with pytest.raises(TypeError, match="the rule must be one of gradclip's"):
        attach(inner, 1.0)
    attach(inner, MaxNorm(1.0))


@pytest.mark.parametrize(
    ("freeze", "reason"), [(False, r"backward\(\) has not reached them"), (True, "none of its 1 parameters requires one")]
)
def test_a_clip_that_never_finds_a_gradient_says_so_once(freeze, reason):
    p = nn.Parameter(torch.zeros(1), requires_grad=not freeze)
    optimizer = torch.optim.SGD([p], lr=1.0)
    attach(optimizer, MaxNorm(1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(9):
            optimizer.step()
    with pytest.warns(UserWarning, match=f"no gradient in 10 steps, so nothing was clipped: {reason}") as caught:
        optimizer.step()
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(20):
            optimizer.step()


def test_a_rare_gradient_is_no_fault():
    p = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=1.0)
    attach(optimizer, MaxNorm(1.0))
    p.grad = torch.tensor([1.0])
    optimizer.step()
    p.grad = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(20):
            optimizer.step()


def test_a_step_that_raises_leaves_nothing_behind():
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise OSError("no disk")

    p = nn.Parameter(torch.zeros(1))
    optimizer = Failing([p], lr=1.0)
    attach(optimizer, MaxNorm(1.0), nonfinite="skip")
    p.grad = torch.tensor([nan])
    with pytest.raises(OSError, match="no disk"):
        optimizer.step()
    with pytest.raises(OSError, match="no disk"):
        optimizer.step()
    optimizer._gradclip.detach()
    assert p.grad is not None


def test_a_rule_that_learns_each_tensor_goes_on_when_one_is_added():
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([a], lr=1.0)
    attached = attach(optimizer, EmaRatio(warmup=3))

    def step(*grads):
        for p, grad in zip((a, b), grads, strict=False):
            p.grad = torch.tensor([grad])
        optimizer.step()
        return attached.last.limit.tolist()

    for _ in range(3):
        assert step(2.0) == [inf]
    assert step(100.0) == pytest.approx([2.1])
    optimizer.add_param_group({"params": [b]})
    assert step(2.0, 50.0)[1] == inf
    assert step(2.0, 50.0)[0] < 3
    assert attached.last.coef.tolist()[1] == 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rule_that_skips_leaves_the_step_out(name):
    p = nn.Parameter(torch.ones(2))
    optimizer = OPTIMIZERS[name]([p])
    attached = attach(optimizer, Skip(5.0, at_most=1))
    before = copy.deepcopy(optimizer.state_dict())
    p.grad = torch.tensor([30.0, 40.0])
    optimizer.step()
    assert p.tolist() == [1, 1]
    assert_equal(optimizer.state_dict(), before)
    assert attached.counts.skipped == 1
    optimizer.step()
    assert p.tolist() != [1, 1]
    assert float(gradclip.norm(p.grad)) == pytest.approx(5.0, rel=1e-6)


@pytest.mark.parametrize("name", ["SGD", "AdamW fused"])
@pytest.mark.parametrize(
    ("rule", "scope"),
    [
        (Median(warmup=2, window=5), None),
        (EmaRatio(warmup=2), None),
        (Ratio(0.01), None),
        (Groups({"0.*": MaxNorm(0.1), "*": Median(warmup=2, window=5)}), None),
        (Both(MaxNorm(0.5), ZScore(warmup=3)), "global"),
    ],
)
def test_rules_that_learn_or_look_at_the_weights(name, rule, scope):
    ours, theirs = network(), network()
    a, b = OPTIMIZERS[name](ours.parameters()), OPTIMIZERS[name](theirs.parameters())
    attach(a, rule, scope=scope, named_parameters=ours.named_parameters())
    clipper = gradclip.Clipper(rule, scope)
    for _ in range(8):
        for model, optimizer in ((ours, a), (theirs, b)):
            optimizer.zero_grad()
            loss_of(model).backward()
            if model is theirs:
                weights_of = {n: p.detach() for n, p in model.named_parameters()} if rule.needs_weights else None
                clipper.by(gradclip.clip_, {n: p.grad for n, p in model.named_parameters()}, weights_of)
            optimizer.step()
    assert same(ours, theirs, folded=name == "AdamW fused")


def test_units_of_a_model_with_transposed_convolutions():
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.ConvTranspose1d(3, 5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = attach(optimizer, Ratio(0.01), scope=units(model), named_parameters=model.named_parameters())
    model(torch.ones(1, 2, 4)).sum().backward()
    optimizer.step()
    assert attached.last.norm.shape == (3 + 1 + 5 + 1,)
    want = model[1].weight.grad.transpose(0, 1).reshape(5, -1).norm(dim=1)
    assert torch.allclose(want, (attached.last.norm * attached.last.coef)[4:9].float(), rtol=1e-5)
    nameless = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(nameless, Ratio(0.01), scope=units(model))
    with pytest.raises(ValueError, match=r"param_groups\[0\].params\[0\] is no parameter of this model"):
        nameless.step()


def test_a_fused_step_that_raises_leaves_no_scale_behind():
    class Failing(torch.optim.SGD):
        fails = True

        @torch.no_grad()
        def step(self, closure=None):
            if self.fails:
                raise OSError("no disk")
            return super().step(closure)

    p = nn.Parameter(torch.zeros(2))
    optimizer = Failing([p], lr=1.0, fused=True)
    attach(optimizer, MaxNorm(1.0))
    p.grad = torch.tensor([30.0, 40.0])
    with pytest.raises(OSError, match="no disk"):
        optimizer.step()
    optimizer.fails = False
    optimizer.step()
    assert p.tolist() == pytest.approx([-0.6, -0.8])
    assert not hasattr(optimizer, "grad_scale")
