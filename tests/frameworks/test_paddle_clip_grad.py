"""`ClipGrad` and `attach` in dynamic graph: every way in which a Paddle optimizer asks for a clip."""

import json
from math import inf, nan

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.optimizer import LBFGS, SGD, Adam, AdamW, Momentum, RMSProp

import gradclip
from gradclip import Bounds, EmaRatio, Groups, MaxNorm, NonFiniteError, Ratio, Skip, ZScore
from gradclip.integrations.paddle import ClipGrad, attach

X = paddle.to_tensor(np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32))


class Net(nn.Layer):
    def __init__(self, need_clip=True, sparse=False):
        super().__init__()
        paddle.seed(0)
        self.one = nn.Linear(3, 4)
        self.two = nn.Linear(4, 1, bias_attr=paddle.ParamAttr(need_clip=need_clip))

    def forward(self, x):
        return self.two(paddle.tanh(self.one(x)))

    def groups(self):
        return [{"params": self.one.parameters()}, {"params": self.two.parameters(), "learning_rate": 1.0}]


def backward(net, scale=100.0):
    (scale * net(X)).sum().backward()


def grads(net):
    return {p.name: p.grad.numpy().copy() for p in net.parameters() if p.grad is not None}


def values(net):
    return {p.name: p.numpy().copy() for p in net.parameters()}


def moves(net, before):
    """What SGD with a learning rate of 1 took: the gradients that it was given."""
    return {name: before[name] - value for name, value in values(net).items()}


def assert_close(got, want, rtol=1e-5, atol=1e-6):
    assert got.keys() == want.keys()
    for name in got:
        np.testing.assert_allclose(got[name], want[name], rtol=rtol, atol=atol)


def length(arrays):
    return float(gradclip.norm({name: np.float64(x) for name, x in arrays.items()}))


RULES = {
    "global": (MaxNorm(1.0), "global"),
    "tensor": (MaxNorm(1.0), "tensor"),
    "element": (MaxNorm(1.0), "element"),
    "bounds": (Bounds(-0.5, 2.0), None),
    "raised": (MaxNorm(1e6, min_norm=1e5), None),
    "like": (MaxNorm(1.0, like="paddle"), None),
    "far": (MaxNorm(1e6), None),
}


@pytest.mark.parametrize(("rule", "scope"), RULES.values(), ids=RULES)
def test_every_scope(rule, scope):
    net = Net()
    clip = ClipGrad(rule, scope)
    optimizer = SGD(1.0, net.parameters(), grad_clip=clip)
    before = values(net)
    backward(net)
    want = gradclip.clip(grads(net), rule, scope=scope)
    optimizer.step()
    assert_close(moves(net, before), want.grads, rtol=1e-4, atol=abs(max(map(np.max, want.grads.values()))) * 1e-5)
    assert_close(grads(net), want.grads, rtol=1e-6, atol=0)
    assert clip.last.norm.numpy() == pytest.approx(want.norm, rel=1e-12)
    assert bool(clip.last.clipped) == bool(want.clipped)
    assert clip.counts == gradclip.Clipper(MaxNorm(1.0)).counts._replace(steps=1, clipped=int(bool(want.clipped)))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda: ClipGrad(MaxNorm(1.0)), lambda: nn.ClipGradByGlobalNorm(1.0)),
        (lambda: ClipGrad(MaxNorm(1.0), "tensor"), lambda: nn.ClipGradByNorm(1.0)),
        (lambda: ClipGrad(MaxNorm(1.0), "element"), lambda: nn.ClipGradByValue(1.0)),
        (lambda: ClipGrad(Bounds(-0.5, 2.0)), lambda: nn.ClipGradByValue(2.0, -0.5)),
    ],
)
@pytest.mark.parametrize("make", [SGD, Momentum, Adam, AdamW, RMSProp])
def test_training_is_as_with_paddles_own(ours, theirs, make):
    trained = []
    for clip in (ours(), theirs()):
        net = Net()
        optimizer = make(0.01, parameters=net.parameters(), weight_decay=0.1, grad_clip=clip)
        for _ in range(5):
            backward(net)
            optimizer.step()
            optimizer.clear_grad()
        trained.append([p.numpy() for p in net.parameters()])
    for a, b in zip(*trained, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6)


def test_minimize():
    net = Net()
    optimizer = SGD(1.0, net.parameters(), grad_clip=ClipGrad(MaxNorm(1.0)))
    before = values(net)
    loss = (100 * net(X)).sum()
    loss.backward()
    optimizer.minimize(loss)
    assert length(moves(net, before)) == pytest.approx(1.0, rel=1e-5)


def test_decay_is_added_after_the_clip():
    net = Net()
    optimizer = SGD(1.0, net.parameters(), weight_decay=0.5, grad_clip=ClipGrad(MaxNorm(1.0)))
    before = values(net)
    backward(net)
    clipped = gradclip.clip(grads(net), MaxNorm(1.0)).grads
    optimizer.step()
    assert_close(moves(net, before), {name: clipped[name] + 0.5 * before[name] for name in before}, atol=1e-5)


def test_parameters_that_are_left_out():
    net = Net(need_clip=False)
    bias = net.two.bias
    optimizer = SGD(1.0, net.parameters(), grad_clip=ClipGrad(MaxNorm(1.0)))
    before = values(net)
    backward(net)
    alone = grads(net).pop(bias.name)
    optimizer.step()
    got = moves(net, before)
    np.testing.assert_allclose(got.pop(bias.name), alone, rtol=1e-5)
    assert abs(alone.item()) > 100
    assert length(got) == pytest.approx(1.0, rel=1e-5)
    assert bias.name not in optimizer._grad_clip.last.grads


def test_frozen_parameters_and_those_without_a_gradient():
    net = Net()
    net.one.weight.stop_gradient = True
    optimizer = SGD(1.0, [*net.parameters(), paddle.create_parameter([2], "float32")], grad_clip=ClipGrad(MaxNorm(1.0)))
    before = values(net)
    optimizer.step()
    assert optimizer._grad_clip.counts.steps == 0
    backward(net)
    optimizer.step()
    got = moves(net, before)
    assert not got[net.one.weight.name].any()
    assert length(got) == pytest.approx(1.0, rel=1e-5)


def test_several_groups_have_one_norm_when_attached():
    net = Net()
    optimizer = SGD(1.0, net.groups())
    attached = attach(optimizer, MaxNorm(1.0), named_parameters=net.named_parameters())
    for step in range(3):
        before = values(net)
        backward(net)
        optimizer.step()
        optimizer.clear_grad()
        assert length(moves(net, before)) == pytest.approx(1.0, rel=1e-5)
        assert attached.counts.steps == step + 1
    assert list(attached.last.grads) == ["one.weight", "one.bias", "two.weight", "two.bias"]


@pytest.mark.parametrize("named", [True, False])
def test_several_groups_have_one_norm_by_parameters(named):
    net = Net()
    optimizer = AdamW(
        1.0,
        parameters=net.groups(),
        grad_clip=ClipGrad(MaxNorm(1.0), parameters=net.named_parameters() if named else net.parameters()),
    )
    backward(net)
    want = gradclip.clip(grads(net), MaxNorm(1.0))
    optimizer.step()
    clip = optimizer._grad_clip
    assert float(clip.last.norm) == pytest.approx(float(want.norm))
    assert clip.counts.steps == 1
    assert_close(grads(net), want.grads)
    assert ("one.weight" in clip.last.grads) == named


def test_paddles_own_clips_every_group_by_itself():
    net = Net()
    optimizer = SGD(1.0, net.groups(), grad_clip=nn.ClipGradByGlobalNorm(1.0))
    before = values(net)
    backward(net)
    optimizer.step()
    assert length(moves(net, before)) == pytest.approx(2**0.5, rel=1e-5)


def test_several_groups_are_refused_before_anything_moves():
    net = Net()
    optimizer = SGD(1.0, net.groups(), grad_clip=ClipGrad(MaxNorm(1.0)))
    before = values(net)
    backward(net)
    raw = grads(net)
    with pytest.raises(ValueError, match=r"2 parameter groups.*attach\(optimizer, rule\).*parameters=net.parameters\(\)"):
        optimizer.step()
    assert_close(values(net), before, atol=0)
    assert_close(grads(net), raw, atol=0)


def test_a_norm_for_every_group_where_each_has_a_clip_of_its_own():
    net = Net()
    groups = [group | {"grad_clip": ClipGrad(MaxNorm(limit))} for group, limit in zip(net.groups(), (3.0, 4.0), strict=True)]
    optimizer = SGD(1.0, groups)
    before = values(net)
    backward(net)
    optimizer.step()
    assert length(moves(net, before)) == pytest.approx(5.0, rel=1e-5)


def test_one_group_alone_is_served():
    net = Net()
    optimizer = SGD(1.0, [{"params": net.parameters()}], grad_clip=ClipGrad(MaxNorm(1.0)))
    before = values(net)
    backward(net)
    optimizer.step()
    assert length(moves(net, before)) == pytest.approx(1.0, rel=1e-5)


def test_parameters_that_the_optimizer_has_besides():
    net = Net()
    optimizer = SGD(1.0, net.groups(), grad_clip=ClipGrad(MaxNorm(1.0), parameters=net.one.parameters()))
    before = values(net)
    backward(net)
    with pytest.raises(ValueError, match=f"parameters= has not, {net.two.weight.name}"):
        optimizer.step()
    assert_close(values(net), before, atol=0)


@pytest.mark.parametrize("how", [0, 1])
def test_groups_that_train_in_turns(how):
    """A group without gradients in one step must not be taken for clipped in the next."""
    net = Net()
    optimizer = SGD(1.0, net.groups())
    attached = attach(optimizer, MaxNorm(1.0))
    layers = [net.one, net.two]
    for step in range(6):
        for i, layer in enumerate(layers):
            for p in layer.parameters():
                p.stop_gradient = (step + how) % 2 == i
        before = values(net)
        backward(net)
        optimizer.step()
        optimizer.clear_grad()
        assert length(moves(net, before)) == pytest.approx(1.0, rel=1e-5)
    assert attached.counts.steps == 6


def test_two_optimizers_that_share_a_clip_and_its_parameters():
    net = Net()
    clip = ClipGrad(MaxNorm(1.0), parameters=net.parameters())
    optimizers = [SGD(1.0, layer.parameters(), grad_clip=clip) for layer in (net.one, net.two)]
    for optimizer, layer in zip(optimizers, (net.one, net.two), strict=True):
        net.clear_gradients()
        backward(net)
        optimizer.step()
        assert length(grads(net)) == pytest.approx(1.0, rel=1e-5)
        assert layer.weight.grad is not None


def test_a_step_that_failed_between_two_groups(monkeypatch):
    net = Net()
    optimizer = SGD(1.0, net.groups())
    attach(optimizer, MaxNorm(1.0))
    backward(net)

    def failing(*_, **__):
        raise RuntimeError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(optimizer, "_append_optimize_op", failing)
        with pytest.raises(RuntimeError, match="no room"):
            optimizer.step()
    net.clear_gradients()
    before = values(net)
    backward(net)
    optimizer.step()
    assert length(moves(net, before)) == pytest.approx(1.0, rel=1e-5)


def test_a_parameter_listed_twice_counts_once():
    net = Net()
    clip = ClipGrad(MaxNorm(1.0), parameters=[*net.parameters(), net.one.weight])
    SGD(1.0, net.parameters(), grad_clip=clip)
    backward(net)
    want = length(grads(net))
    clip([(p, p.grad) for p in net.parameters()])
    assert float(clip.last.norm) == pytest.approx(want, rel=1e-12)


def test_two_parameters_of_one_name():
    layers = [nn.Linear(1, 1, bias_attr=False) for _ in range(2)]
    named = [pair for layer in layers for pair in layer.named_parameters()]
    clip = ClipGrad(MaxNorm(1.0), parameters=named)
    clip([(p, paddle.to_tensor([[x]])) for (_, p), x in zip(named, (3.0, 4.0), strict=True)])
    assert float(clip.last.norm) == 5.0
    assert list(clip.last.grads) == ["weight", "weight#1"]


def sparse_net(ids=(3, 1, 1)):
    paddle.seed(0)
    layer = nn.Embedding(6, 2, sparse=True)
    return layer, lambda: (100 * layer(paddle.to_tensor(list(ids)))).sum().backward()


@pytest.mark.parametrize("scope", ["global", "tensor", "element"])
def test_sparse_gradients(scope):
    layer, sparse_backward = sparse_net()
    optimizer = SGD(1.0, layer.parameters(), grad_clip=ClipGrad(MaxNorm(1.0), scope))
    before = layer.weight.numpy().copy()
    sparse_backward()
    optimizer.step()
    full = np.zeros((6, 2))
    full[3], full[1] = 100, 200
    want = gradclip.clip(full, MaxNorm(1.0), scope=scope)
    np.testing.assert_allclose(before - layer.weight.numpy(), want.grads, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [SGD, Adam])
def test_skip_leaves_parameters_and_state(make):
    net = Net()
    optimizer = make(1.0, parameters=net.parameters(), grad_clip=ClipGrad(MaxNorm(1.0), nonfinite="skip"))
    before = values(net)
    backward(net, nan)
    optimizer.step()
    assert_close(values(net), before, atol=0)
    assert optimizer._grad_clip.counts._asdict() == {"steps": 1, "clipped": 0, "skipped": 1, "nonfinite": 1}
    optimizer.clear_grad()
    backward(net)
    optimizer.step()
    fresh = Net()
    other = make(1.0, parameters=fresh.parameters(), grad_clip=ClipGrad(MaxNorm(1.0)))
    backward(fresh)
    other.step()
    for a, b in zip(net.parameters(), fresh.parameters(), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_skip_leaves_out_all_groups():
    net = Net()
    optimizer = SGD(1.0, net.groups())
    attached = attach(optimizer, MaxNorm(1.0), nonfinite="skip")
    before = values(net)
    backward(net)
    net.two.bias.grad.set_value(paddle.to_tensor([nan]))
    optimizer.step()
    assert_close(values(net), before, atol=0)
    assert attached.counts.skipped == 1


def test_a_rule_that_skips():
    net = Net()
    optimizer = SGD(1.0, net.parameters(), grad_clip=ClipGrad(Skip(1.0)))
    before = values(net)
    backward(net)
    optimizer.step()
    assert_close(values(net), before, atol=0)
    assert optimizer._grad_clip.last.skipped


def test_raise_names_the_parameter_and_changes_nothing():
    net = Net()
    optimizer = Adam(1.0, parameters=net.groups())
    attached = attach(optimizer, MaxNorm(1.0), named_parameters=net.named_parameters())
    before = values(net)
    backward(net)
    net.two.weight.grad.set_value(paddle.to_tensor([[inf], [1.0], [1.0], [1.0]]))
    raw = grads(net)
    with pytest.raises(NonFiniteError, match=r"two.weight \(1 inf of 4\)"):
        optimizer.step()
    assert_close(values(net), before, atol=0)
    assert_close(grads(net), raw, atol=0)
    assert attached.counts.steps == 0


def test_zero_and_keep():
    for policy, want in (("zero", 0.0), ("keep", nan)):
        net = Net()
        optimizer = SGD(1.0, net.parameters(), grad_clip=ClipGrad(MaxNorm(1.0), nonfinite=policy))
        before = values(net)
        backward(net, nan)
        optimizer.step()
        assert np.isnan(length(moves(net, before))) == np.isnan(want)


def test_rules_that_learn_and_those_that_look_at_the_weights():
    for rule in (ZScore(warmup=2), EmaRatio(warmup=2), Ratio(0.1), Groups({"*.w_0": MaxNorm(1.0), "*": None})):
        net = Net()
        clip = ClipGrad(rule)
        optimizer = SGD(1e-3, net.parameters(), grad_clip=clip)
        numpys = (
            gradclip.Clipper(rule, scope=gradclip.Unit(lambda _, x: 1 if x.ndim == 2 else None))
            if isinstance(rule, Ratio)
            else gradclip.Clipper(rule)
        )
        for scale in (1.0, 1.1, 0.9, 50.0, 1.0):
            backward(net, scale)
            want = numpys(grads(net), values(net) if rule.needs_weights else None)
            optimizer.step()
            assert_close(grads(net), want.grads)
            optimizer.clear_grad()
        assert clip.counts == numpys.counts
        assert clip.counts.clipped


def test_a_schedule_counts_steps_and_not_groups():
    net = Net()
    optimizer = SGD(1.0, net.groups())
    attached = attach(optimizer, MaxNorm(lambda step: 1.0 / (step + 1)))
    limits = []
    for _ in range(3):
        backward(net)
        optimizer.step()
        optimizer.clear_grad()
        limits.append(float(attached.last.limit))
    assert limits == [1.0, 0.5, 1 / 3]


def test_state_goes_on_where_it_was_saved():
    def run(clip, steps):
        net = Net()
        optimizer = SGD(1e-3, net.parameters(), grad_clip=clip)
        for step in steps:
            backward(net, 1.0 + step)
            optimizer.step()
            optimizer.clear_grad()
        return float(clip.last.limit)

    whole, first, second = (ClipGrad(ZScore(warmup=2)) for _ in range(3))
    run(first, range(3))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    run(second, range(1))
    run(whole, range(3))
    run(whole, range(1))
    assert second.state_dict() == whole.state_dict()


def test_the_rule_may_be_replaced_between_steps():
    net = Net()
    clip = ClipGrad(MaxNorm(1.0))
    optimizer = SGD(1.0, net.parameters(), grad_clip=clip)
    backward(net)
    optimizer.step()
    clip.clipper.rule = MaxNorm(0.25)
    optimizer.clear_grad()
    backward(net)
    optimizer.step()
    assert float(clip.last.limit) == 0.25


def test_accumulated_gradients_are_clipped_once():
    net = Net()
    clip = ClipGrad(MaxNorm(1.0))
    optimizer = SGD(1.0, net.parameters(), grad_clip=clip)
    before = values(net)
    for _ in range(4):
        backward(net)
    optimizer.step()
    assert clip.counts.steps == 1
    assert length(moves(net, before)) == pytest.approx(1.0, rel=1e-5)


def test_gradients_in_the_master_precision():
    """With `master_grad=True` the gradient of a bfloat16 parameter is float32; its kernels are for accelerators alone."""
    p = nn.Linear(2, 1).to(dtype="bfloat16").weight
    main = paddle.to_tensor([[3.0], [4.0]])
    clip = ClipGrad(MaxNorm(1.0))
    ((same, grad),) = clip([(p, main)])
    assert same is p
    assert grad.dtype == paddle.float32
    assert p.dtype == paddle.bfloat16
    assert grad.numpy().ravel() == pytest.approx([0.6, 0.8])
    assert clip.last.norm.dtype == paddle.float64


def test_main_grad_is_what_is_clipped():
    net = Net()
    clip = ClipGrad(MaxNorm(1.0))
    optimizer = SGD(1.0, net.parameters(), grad_clip=clip)
    before = values(net)
    backward(net)
    for p in net.parameters():
        p.main_grad = paddle.full(p.shape, 3.0)
    optimizer.step()
    size = sum(p.size for p in net.parameters())
    assert float(clip.last.norm) == pytest.approx(3 * size**0.5)
    assert_close(moves(net, before), {name: np.full(x.shape, size**-0.5) for name, x in before.items()}, rtol=1e-4)


def test_half_precision_gradients_side_by_side():
    kinds = ("float16", "bfloat16", "float32")
    params = [nn.Linear(1, 1).to(dtype=kind).bias for kind in kinds]
    pairs = [(p, paddle.to_tensor([60000.0]).astype(kind)) for p, kind in zip(params, kinds, strict=True)]
    clip = ClipGrad(MaxNorm(3.0**0.5))
    clip(pairs)
    assert float(clip.last.norm) == pytest.approx(60000 * 3**0.5, rel=1e-3)
    for (_, grad), kind in zip(pairs, kinds, strict=True):
        assert grad.dtype == getattr(paddle, kind)
        assert grad.astype("float32").item() == pytest.approx(1.0, rel=1e-2)


# Paddle copies the labels of a batch in a way that it warns of itself
hapi = pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")


def dataset():
    random = np.random.default_rng(0)
    return paddle.io.TensorDataset([paddle.to_tensor(random.standard_normal((32, k)).astype(np.float32)) for k in (3, 1)])


class Norms(paddle.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.norms = []

    def on_train_batch_end(self, step, logs=None):
        self.norms.append(float(self.model._optimizer._grad_clip.last.norm))


@hapi
@pytest.mark.filterwarnings("ignore:amp_guard can only be enabled on:UserWarning")
@pytest.mark.filterwarnings("ignore:AmpScaler can only be enabled on:UserWarning")  # the CPU has no scaler, and Paddle says so
@pytest.mark.parametrize("amp", [None, "O1", "O2"])
def test_model_fit(amp):
    paddle.seed(0)
    model, clip, read = paddle.Model(Net()), ClipGrad(MaxNorm(0.1)), Norms()
    model.prepare(SGD(0.1, model.parameters(), grad_clip=clip), nn.MSELoss(), amp_configs=amp)
    model.fit(dataset(), batch_size=8, epochs=2, verbose=0, callbacks=[read])
    assert clip.counts.steps == 8
    assert len(read.norms) == 8
    assert min(read.norms) > 0.1


@hapi
def test_model_fit_with_accumulation_clips_once_an_update():
    paddle.seed(0)
    model, clip = paddle.Model(Net()), ClipGrad(MaxNorm(0.1))
    model.prepare(SGD(0.1, model.parameters(), grad_clip=clip), nn.MSELoss())
    model.fit(dataset(), batch_size=8, epochs=1, verbose=0, accumulate_grad_batches=2)
    assert clip.counts.steps == 2


def test_detach():
    net = Net()
    optimizer = SGD(1.0, net.groups())
    attached = attach(optimizer, MaxNorm(1.0))
    with pytest.raises(ValueError, match="clips already"):
        attach(optimizer, MaxNorm(1.0))
    attached.detach()
    before = values(net)
    backward(net)
    want = grads(net)
    optimizer.step()
    assert_close(moves(net, before), want, rtol=1e-4, atol=1e-3)
    assert attached.counts.steps == 0
    attach(optimizer, MaxNorm(1.0)).detach()


def test_what_cannot_be_attached_to():
    net = Net()
    with pytest.raises(TypeError, match=r"paddle.optimizer.Optimizer; got Net"):
        attach(net, MaxNorm(1.0))
    with pytest.raises(ValueError, match="LBFGS never calls"):
        attach(LBFGS(parameters=net.parameters()), MaxNorm(1.0))
    with pytest.raises(ValueError, match="clips already"):
        attach(SGD(1.0, net.parameters(), grad_clip=nn.ClipGradByNorm(1.0)), MaxNorm(1.0))


def test_bad_arguments():
    with pytest.raises(ValueError, match="max_norm must be"):
        ClipGrad(MaxNorm(-1.0))
    with pytest.raises(TypeError, match="rule must be one of gradclip's"):
        ClipGrad(1.0)
    with pytest.raises(ValueError, match="scope must be one of"):
        ClipGrad(Bounds(-1.0, 1.0), "global")
    with pytest.raises(ValueError, match="nonfinite must be one of"):
        ClipGrad(MaxNorm(1.0), nonfinite="ignore")
    assert str(ClipGrad(MaxNorm(1.0))) == "ClipGrad(MaxNorm(max_norm=1.0, min_norm=None, like=None))"


def test_nothing_keeps_the_gradients_alive():
    import gc
    import weakref

    net = Net()
    clip = ClipGrad(MaxNorm(1.0))
    grad = paddle.to_tensor([3.0, 4.0])
    dead = weakref.ref(grad)
    clip([(net.one.weight, grad)])
    del grad
    gc.collect()
    assert dead() is None
