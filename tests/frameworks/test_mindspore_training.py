"""The two ways to train, held against a loop written out in NumPy's terms; and what MindSpore 2.10 lets one stumble over."""

import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.amp import DynamicLossScaler, FixedLossScaleManager, all_finite, auto_mixed_precision
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import Callback, Model

import gradclip
from gradclip import MaxNorm, Median, Skip
from gradclip.integrations.mindspore import ClipGradients, TrainOneStepCell, TrainOneStepWithLossScaleCell, clipped

EXAMPLES = Path(__file__).parents[2] / "examples"
MODES = ("pynative", "graph", "strict")
STEPS, RATE = 5, 0.125
DRAW = np.random.default_rng(0)
X = DRAW.standard_normal((STEPS, 8, 3)).astype(np.float32)
Y = (10 * X.sum(axis=2, keepdims=True)).astype(np.float32)


@pytest.fixture(autouse=True)
def _settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a failed compilation, and auto_mixed_precision, leave files behind
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE, jit_syntax_level=ms.LAX)


@pytest.fixture(params=MODES)
def mode(request):
    if request.param != "pynative":
        ms.set_context(mode=ms.GRAPH_MODE)
    if request.param == "strict":  # in which nothing falls back on the host, as nothing may while data are sunk
        ms.set_context(jit_syntax_level=ms.STRICT)
    return request.param


class Net(nn.Cell):
    """(x @ a) · b, from the same start every time."""

    def __init__(self):
        super().__init__()
        self.a = Parameter(Tensor(np.linspace(-1, 1, 6).reshape(3, 2), ms.float32), name="a")
        self.b = Parameter(Tensor([[1.0], [2.0]], ms.float32), name="b")

    def construct(self, x):
        return ops.matmul(ops.matmul(x, self.a), self.b)


def weights(net):
    return [p.asnumpy().copy() for p in (net.a, net.b)]


def sgd(net, **options):
    return nn.SGD(net.trainable_params(), learning_rate=RATE, **options)


def by_hand(rule=None, scope=None, factors=(1.0,) * STEPS):
    """The weights, losses and norms of every step of plain gradient descent, each loss times a factor."""
    a, b = (x.astype(np.float64) for x in weights(Net()))
    seen, losses, norms = [], [], []
    clipper = gradclip.Clipper(rule or MaxNorm(1.0), scope)
    for x, y, factor in zip(X, Y, factors, strict=True):
        off = x @ a @ b - y
        slope = 2 * factor * off / off.size
        clip = clipper([x.T @ slope @ b.T, (x @ a).T @ slope])
        a, b = (w - RATE * g for w, g in zip((a, b), clip.grads, strict=True))
        seen.append([a, b])
        losses.append(factor * np.mean(off**2))
        norms.append(np.max(clip.norm))
    return seen, losses, norms


def assert_as_by_hand(net, losses, clip, **how):
    seen, wanted, norms = by_hand(**how)
    for ours, theirs in zip(weights(net), seen[-1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    np.testing.assert_allclose([float(x) for x in losses], wanted, rtol=1e-5)
    assert float(clip.norm) == pytest.approx(norms[-1], rel=1e-5)
    assert clip.counts.asnumpy().tolist()[0] == STEPS


def batches():
    return [(Tensor(x), Tensor(y)) for x, y in zip(X, Y, strict=True)]


def data():
    return NumpySlicesDataset((X.reshape(-1, 3), Y.reshape(-1, 1)), shuffle=False).batch(8)


# A loop of one's own.


@pytest.mark.parametrize("scope", ["global", "tensor", "element"])
@pytest.mark.parametrize("way", [*MODES[:2], "jit"])
def test_a_loop_of_ones_own(scope, way):
    ms.set_context(mode=ms.GRAPH_MODE if way == "graph" else ms.PYNATIVE_MODE)
    net, loss_fn = Net(), nn.MSELoss()
    optimizer, clip = sgd(net), ClipGradients(MaxNorm(1.0), scope=scope)

    def forward(x, y):
        return loss_fn(net(x), y)

    gradients = ms.value_and_grad(forward, None, optimizer.parameters)

    def step(x, y):
        loss, grads = gradients(x, y)
        return ops.depend(loss, optimizer(clip(grads)))

    step = ms.jit(step) if way == "jit" else step
    assert_as_by_hand(net, [step(x, y) for x, y in batches()], clip, scope=scope)


def test_groups_put_the_parameters_into_another_order():
    net = Net()
    optimizer = nn.SGD([{"params": [net.b]}, {"params": [net.a]}], learning_rate=RATE)
    gradients = ms.value_and_grad(lambda_free(net), None, optimizer.parameters)
    clip, losses = ClipGradients(MaxNorm(1.0)), []
    for x, y in batches():
        loss, grads = gradients(x, y)
        optimizer(clip(grads))
        losses.append(loss)
    assert [p.name for p in optimizer.parameters] == ["b", "a"]
    assert_as_by_hand(net, losses, clip)


def lambda_free(net):
    loss_fn = nn.MSELoss()

    def forward(x, y):
        return loss_fn(net(x), y)

    return forward


def test_accumulated_gradients_are_clipped_once():
    net = Net()
    optimizer, clip = sgd(net), ClipGradients(MaxNorm(1.0))
    gradients = ms.value_and_grad(lambda_free(net), None, optimizer.parameters)
    losses = []
    for x, y in batches():
        halves = [gradients(x[:4], y[:4]), gradients(x[4:], y[4:])]
        mean = tuple((g + h) / 2 for g, h in zip(halves[0][1], halves[1][1], strict=True))
        optimizer(clip(mean))
        losses.append((halves[0][0] + halves[1][0]) / 2)
    assert_as_by_hand(net, losses, clip)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_mixed_precision_with_a_scaler_of_ones_own(level):
    net = auto_mixed_precision(Net(), level)
    optimizer, clip = nn.SGD(net.trainable_params(), RATE), ClipGradients(MaxNorm(1.0))
    scaler, loss_fn = DynamicLossScaler(2.0**8, 2, 100), nn.MSELoss()

    def forward(x, y, factor):
        return scaler.scale(loss_fn(net(x).astype(ms.float32), y) * factor)

    gradients, taken = ms.value_and_grad(forward, None, optimizer.parameters), []
    for i, (x, y) in enumerate(batches()):
        _, grads = gradients(x, y, Tensor(np.inf if i == 1 else 1.0, ms.float32))
        grads = scaler.unscale(grads)
        finite = bool(all_finite(grads))
        if finite:
            optimizer(clip(grads))
            assert float(clip.limit) == 1.0
        scaler.adjust(Tensor(finite))
        taken.append(finite)
    assert taken == [True, False, True, True, True]
    assert clip.counts.asnumpy().tolist() == [4, 4, 0, 0]
    assert float(scaler.scale_value) == 2.0**7


# The training cells.


@pytest.mark.parametrize("scope", ["global", "tensor", "element"])
def test_a_step_that_clips(mode, scope):
    net = Net()
    step = TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), sgd(net), MaxNorm(1.0), scope=scope)
    assert_as_by_hand(net, [step(x, y) for x, y in batches()], step.clip, scope=scope)


def test_the_loss_is_that_of_the_stock_cell(mode):
    ours, stock = (
        kind(nn.WithLossCell(net, nn.MSELoss()), nn.SGD(net.trainable_params(), 0.01), *rule)
        for kind, rule, net in ((TrainOneStepCell, [MaxNorm(1e9)], Net()), (nn.TrainOneStepCell, [], Net()))
    )
    for x, y in batches():
        a, b = ours(x, y), stock(x, y)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert float(a) == pytest.approx(float(b), rel=1e-6)


def test_a_scaled_loss_is_seen_without_its_scale(mode):
    net = Net()
    optimizer = sgd(net, loss_scale=64.0)
    step = TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer, MaxNorm(1.0), sens=64.0)
    assert_as_by_hand(net, [step(x, y) for x, y in batches()], step.clip)


def test_a_step_that_overflows_is_left_out(mode):
    net, scale = Net(), nn.DynamicLossScaleUpdateCell(2.0**10, 2, 1000)
    step = TrainOneStepWithLossScaleCell(nn.WithLossCell(net, nn.MSELoss()), sgd(net), scale, MaxNorm(1.0))
    x, y = batches()[0]
    loss, overflow, factor = step(x, y)
    assert (float(loss), bool(overflow), float(factor)) == (pytest.approx(by_hand()[1][0], rel=1e-5), False, 2.0**10)
    for ours, theirs in zip(weights(net), by_hand()[0][0], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    before, norm = weights(net), float(step.clip.norm)
    for bad in (np.inf, np.nan):
        _, overflow, _ = step(x, Tensor(np.full((8, 1), bad, np.float32)))
        assert bool(overflow)
        assert all(np.array_equal(a, b) for a, b in zip(before, weights(net), strict=True))
    assert (step.clip.counts.asnumpy().tolist(), float(step.clip.norm)) == ([1, 1, 0, 0], norm)
    assert float(step(x, y)[2]) == 2.0**8


def test_a_step_that_is_not_finite_is_left_out(mode):
    net = Net()
    optimizer = nn.Momentum(net.trainable_params(), RATE, 0.9)
    step = TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer, MaxNorm(1.0), nonfinite="skip")
    x, y = batches()[0]
    step(x, y)
    before = weights(net), [p.asnumpy().copy() for p in optimizer.moments]
    step(x, Tensor(np.full((8, 1), np.nan, np.float32)))
    for ours, theirs in zip((*weights(net), *(p.asnumpy() for p in optimizer.moments)), [*before[0], *before[1]], strict=True):
        assert np.array_equal(ours, theirs)
    assert step.clip.counts.asnumpy().tolist() == [2, 1, 1, 1]


# An optimizer that clips.


class Seen(Callback):
    """What a callback reads of every step."""

    def __init__(self, clip):
        super().__init__()
        self.clip, self.losses, self.norms = clip, [], []

    def on_train_step_end(self, run_context):
        self.losses.append(float(run_context.original_args().net_outputs))
        self.norms.append(float(self.clip.norm))


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("way", ["optimizer", "step"])
def test_under_model(mode, way, sink):
    """Sunk, too: on the CPU MindSpore does not sink, and does not say so; that the cells could be is what `strict` shows."""
    net = Net()
    if way == "optimizer":
        optimizer = clipped(sgd(net), MaxNorm(1.0))
        model, clip = Model(net, nn.MSELoss(), optimizer), optimizer.clip
    else:
        step = TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), sgd(net), MaxNorm(1.0))
        model, clip = Model(step), step.clip
    seen = Seen(clip)
    model.train(1, data(), callbacks=[seen], dataset_sink_mode=sink)
    assert_as_by_hand(net, seen.losses, clip)
    np.testing.assert_allclose(seen.norms, by_hand()[2], rtol=1e-5)


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
@pytest.mark.parametrize("manager", [None, FixedLossScaleManager(256.0, drop_overflow_update=False)], ids=["plain", "scaled"])
def test_model_in_mixed_precision(level, manager):
    net = Net()
    optimizer = clipped(sgd(net, loss_scale=1.0 if manager is None else 256.0), MaxNorm(1.0))
    options = {} if manager is None else {"loss_scale_manager": manager}
    Model(net, nn.MSELoss(), optimizer, amp_level=level, **options).train(1, data(), dataset_sink_mode=False)
    assert float(optimizer.clip.norm) == pytest.approx(by_hand()[2][-1], rel=1e-5 if level == "O0" else 2e-2)


def test_model_with_a_dynamic_scaler_is_refused_by_mindspore_on_the_cpu():
    """O2 takes one; what trains there is a loop of one's own, or TrainOneStepWithLossScaleCell."""
    net = Net()
    with pytest.raises(ValueError, match="loss_scale_manager"):
        Model(net, nn.MSELoss(), clipped(sgd(net), MaxNorm(1.0)), amp_level="O2").train(1, data(), dataset_sink_mode=False)


OPTIMIZERS = {
    "SGD": lambda params: nn.SGD(params, 0.1, momentum=0.9, weight_decay=0.1),
    "Momentum": lambda params: nn.Momentum(params, 0.1, 0.9),
    "Adam": lambda params: nn.Adam(params, 0.1),
    "AdamWeightDecay": lambda params: nn.AdamWeightDecay(params, 0.1, weight_decay=0.1),
    "RMSProp": lambda params: nn.RMSProp(params, 0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mode", MODES[:2], indirect=True)
def test_every_optimizer_is_given_what_is_clipped(mode, name):
    ours, theirs = Net(), Net()
    optimizer = clipped(OPTIMIZERS[name](ours.trainable_params()), MaxNorm(1.0))
    plain = OPTIMIZERS[name](theirs.trainable_params())
    for k in (1.0, 30.0, 0.01):
        grads = [k * np.ones((3, 2), np.float32), -k * np.ones((2, 1), np.float32)]
        optimizer(tuple(map(Tensor, grads)))
        plain(tuple(map(Tensor, gradclip.clip(grads, MaxNorm(1.0)).grads)))
    for a, b in zip(weights(ours), weights(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert optimizer.clip.counts.asnumpy().tolist() == [3, 2, 0, 0]  # each step is seen once
    assert optimizer.get_lr() == plain.get_lr()


def test_a_rule_that_learns_and_skips(mode):
    rule = Skip(Median(k=2.0, warmup=2), at_most=2)
    net = Net()
    optimizer, clipper = clipped(sgd(net), rule), gradclip.Clipper(rule)
    for k in (1.0, 1.5, 1.0, 40.0, 1.0, 40.0, 50.0, 60.0, 1.0):
        grads = [np.full((3, 2), k, np.float32), np.full((2, 1), k, np.float32)]
        before, want = weights(net), clipper(grads)
        optimizer(tuple(map(Tensor, grads)))
        assert bool(optimizer.clip.skipped) == bool(want.skipped)
        for old, new, grad in zip(before, weights(net), want.grads, strict=True):
            np.testing.assert_allclose(new, old if want.skipped else old - RATE * grad, rtol=1e-5, atol=1e-6)
    assert optimizer.clip.counts.asnumpy().tolist() == list(clipper.counts)


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(TypeError, match=r"optimizer must be a mindspore.nn.Optimizer.*ClipGradients"):
        clipped(Net(), MaxNorm(1.0))


# The compiler.


@pytest.mark.parametrize("mode", ["strict"], indirect=True)  # it takes most of a minute
def test_a_thousand_parameters_compile(mode):
    clip = ClipGradients(MaxNorm(1.0))
    done = clip(tuple(Tensor([1.0]) for _ in range(1000)))
    assert len(done) == 1000
    assert float(clip.norm) == pytest.approx(1000**0.5)
    assert float(done[-1]) == pytest.approx(1000**-0.5)


def test_new_gradients_and_thresholds_compile_once():
    ms.set_context(mode=ms.GRAPH_MODE)
    limit = Parameter(Tensor(1.0), name="limit", requires_grad=False)
    clip = ClipGradients(MaxNorm(limit))
    for k in (1.0, 2.0, 3.0):
        limit.set_data(Tensor(k))
        clip((Tensor([3.0 * k, 4.0 * k]), Tensor([k])))
    assert len(clip.compile_cache) == 1


def test_four_steps_in_one_graph():
    """As a sunk epoch has them."""
    net, other = Net(), Net()
    steps = [TrainOneStepCell(nn.WithLossCell(n, nn.MSELoss()), sgd(n), MaxNorm(1.0)) for n in (net, other)]
    (x, y), *_ = batches()

    def four(x, y):
        loss = steps[0](x, y)
        for _ in range(3):
            loss = ops.depend(steps[0](x, y), loss)
        return loss

    ms.jit(four)(x, y)
    for _ in range(4):
        steps[1](x, y)
    for a, b in zip(weights(net), weights(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert steps[0].clip.counts.asnumpy().tolist() == [4, 4, 0, 0]


# The examples.


@pytest.mark.parametrize("name", ["mindspore_loop", "mindspore_model"])
def test_the_examples_show_what_they_say(name, tmp_path):
    run = subprocess.run([sys.executable, EXAMPLES / f"{name}.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    print(run.stdout)
    assert "not finite from step" in lines[0]
    for line in lines[1:]:
        first, last = line.partition("loss ")[2].split()[0], line.partition("→ ")[2].split()[0]
        assert float(last) < 0.5 * float(first)
