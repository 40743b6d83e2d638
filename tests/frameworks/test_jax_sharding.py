"""Arrays on several devices, of which the CPU can pretend to have some: sharded under jit and eagerly, and in shard_map."""

from functools import partial
from math import inf, nan

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import gradclip
from gradclip import Bounds, Clipper, MaxNorm, MaxRms, NonFiniteError, Ratio, ZScore, clip
from gradclip.integrations.optax import clip as clipping, skip

jax.config.update("jax_num_cpu_devices", 4)  # before the first array is made
SCOPES = [("global", 1), ("global", 2), ("global", 3), ("global", inf), ("tensor", 2), ("tensor", inf), ("element", 2)]


def tree(scale=1.0):
    random = np.random.default_rng(0)
    return {name: np.float32(scale) * random.standard_normal((8, 6)).astype(np.float32) for name in ("a", "b")}


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit])
def mesh(request):
    return jax.make_mesh((4,), ("d",), axis_types=(request.param,))


def spread(grads, mesh, spec=None):
    spec = P("d") if spec is None else spec
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec)), grads)


def over(axis):
    """Joins the powers of the devices along an axis."""

    def reduce(power, p):
        return jax.lax.pmax(power, axis) if p == inf else jax.lax.psum(power, axis)

    return reduce


def assert_same(clipped, want):
    assert np.asarray(clipped.norm) == pytest.approx(want.norm, rel=1e-6)
    for ours, theirs in zip(*map(jax.tree.leaves, (clipped.grads, want.grads)), strict=True):
        assert np.asarray(ours) == pytest.approx(theirs, rel=1e-6)
    assert bool(clipped.clipped) == bool(want.clipped)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e25, 1e-25])
@pytest.mark.parametrize(("scope", "p"), SCOPES)
def test_under_jit_the_norm_is_that_of_the_whole(mesh, scope, p, scale):
    grads = tree(scale)
    work = jax.jit(lambda grads: clip(grads, MaxNorm(1.0), scope=scope, p=p, nonfinite="keep"))
    given = spread(grads, mesh)
    clipped = work(given)
    assert_same(clipped, clip(grads, MaxNorm(1.0), scope=scope, p=p))
    assert clipped.grads["a"].sharding.is_equivalent_to(given["a"].sharding, 2)


@pytest.mark.parametrize("policy", ["raise", "zero", "skip", "keep"])
def test_eagerly_too(mesh, policy):
    given = spread(tree(), mesh)
    for scope, p in SCOPES:
        clipped = clip(given, MaxNorm(1.0), scope=scope, p=p, nonfinite=policy)
        assert_same(clipped, clip(tree(), MaxNorm(1.0), scope=scope, p=p))
        assert clipped.grads["a"].sharding.is_equivalent_to(given["a"].sharding, 2)


def test_policies_look_at_every_device(mesh):
    grads = tree()
    grads["a"][7, 5] = nan
    with pytest.raises(NonFiniteError, match=r"a \(1 NaN of 48\)"):
        clip(spread(grads, mesh), MaxNorm(1.0))
    skipped = clip(spread(grads, mesh), MaxNorm(1.0), nonfinite="skip")
    assert skipped.skipped
    assert np.array_equal(skipped.grads["a"], grads["a"], equal_nan=True)
    assert not np.any(clip(spread(grads, mesh), MaxNorm(1.0), nonfinite="zero").grads["a"])


def test_a_clipper_remembers(mesh):
    ours, theirs = Clipper(ZScore(2.0, warmup=2)), Clipper(ZScore(2.0, warmup=2))
    for scale in (1.0, 1.1, 0.9, 50.0):
        ours(spread(tree(scale), mesh))
        theirs(tree(scale))
    assert ours.counts == theirs.counts
    assert ours.last.limit == pytest.approx(float(theirs.last.limit), rel=1e-5)


def mapped(mesh, check, work, scope):
    """The clip of each device's part, its fields the same on all."""
    out = (P("d"), P(), P("d") if scope == "element" else P())
    return jax.jit(jax.shard_map(work, mesh=mesh, in_specs=P("d"), out_specs=out, check_vma=check))


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e25, 1e-25])
@pytest.mark.parametrize(("scope", "p"), SCOPES)
def test_in_shard_map_reduce_joins_the_devices(mesh, check, scope, p, scale):
    grads = tree(scale)

    def work(grads):
        done = clip(grads, MaxNorm(1.0), scope=scope, p=p, nonfinite="keep", reduce=over("d"))
        return done.grads, done.norm, done.clipped.reshape(1) if scope == "element" else done.clipped

    found, norm, changed = mapped(mesh, check, work, scope)(spread(grads, mesh))
    want = clip(grads, MaxNorm(1.0), scope=scope, p=p)
    assert np.asarray(norm) == pytest.approx(want.norm, rel=1e-6)
    assert np.any(changed) == bool(want.clipped)
    for ours, theirs in zip(*map(jax.tree.leaves, (found, want.grads)), strict=True):
        assert np.asarray(ours) == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("p", [2, inf])
def test_a_nan_on_one_device_is_seen_by_all(mesh, p):
    """A maximum over devices loses NaN, so that it travels beside."""
    grads = tree()
    grads["b"][0, 0] = nan

    def work(grads):
        done = clip(grads, MaxNorm(1.0), p=p, nonfinite="skip", reduce=over("d"))
        return done.grads, done.norm, done.skipped

    found, norm, skipped = mapped(mesh, True, work, "global")(spread(grads, mesh))
    assert skipped
    assert np.isnan(norm)
    assert not np.any(found["a"])


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e25, 1e-25])
@pytest.mark.parametrize(("scope", "p"), SCOPES)
def test_in_shard_map_the_axes_are_read(mesh, scope, p, scale):
    """Nothing is named, and everything but the gradients is the same on all devices."""
    grads = tree(scale)

    def work(grads):
        done = clip(grads, MaxNorm(1.0), scope=scope, p=p, nonfinite="keep")
        return done.grads, done.norm, done.clipped

    found, norm, changed = mapped(mesh, True, work, "global")(spread(grads, mesh))
    want = clip(grads, MaxNorm(1.0), scope=scope, p=p)
    assert np.asarray(norm) == pytest.approx(want.norm, rel=1e-6)
    assert bool(changed) == bool(want.clipped)
    for ours, theirs in zip(*map(jax.tree.leaves, (found, want.grads)), strict=True):
        assert np.asarray(ours) == pytest.approx(theirs, rel=1e-6)


def test_where_they_are_not_checked_every_device_clips_by_its_own():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    work = lambda x: (gradclip.norm(x).reshape(1), jnp.zeros(()), jnp.zeros(1, bool))  # noqa: E731
    each = np.asarray(mapped(mesh, False, work, "element")(spread(tree()["a"], mesh))[0])
    assert each == pytest.approx(np.linalg.norm(tree()["a"].reshape(4, -1), axis=1), rel=1e-6)


@pytest.mark.parametrize("scope", ["global", "tensor"])
@pytest.mark.parametrize("p", [1, 2, 3, inf])
def test_every_element_counts_once_whatever_it_varies_along(scope, p):
    """Along one axis, the other, both, none; one collective, or two of a maximum and its NaN in one."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    random = np.random.default_rng(0)
    grads = {name: random.standard_normal((4, 4)).astype(np.float32) for name in "wxyz"}
    specs = {"w": P("a"), "x": P(None, "b"), "y": P("a", "b"), "z": P()}

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(specs,), out_specs=(specs, P()))
    def work(grads):
        done = clip(grads, MaxNorm(1.0), scope=scope, p=p, nonfinite="keep")
        return done.grads, done.norm

    found, norm = work(grads)
    want = clip(grads, MaxNorm(1.0), scope=scope, p=p)
    assert np.asarray(norm) == pytest.approx(np.asarray(want.norm), rel=1e-6)
    for ours, theirs in zip(*map(jax.tree.leaves, (found, want.grads)), strict=True):
        assert np.asarray(ours) == pytest.approx(theirs, rel=1e-5)


def test_one_collective():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    specs = {f"w{i}": P("d") if i % 2 else P() for i in range(20)}
    norm = jax.jit(jax.shard_map(lambda x: gradclip.norm(x), mesh=mesh, in_specs=(specs,), out_specs=P()))
    text = norm.lower({name: jnp.ones((8, 2)) for name in specs}).compile().as_text()
    main = text[text.index("ENTRY") :]
    assert main.count(" all-reduce(") == 1, main  # those of the branch that rescales are not taken


def test_what_varies_has_its_whole_size(mesh):
    """The root mean square over all devices' parts."""
    work = lambda x: clip(x, MaxRms(0.5), scope="tensor", nonfinite="keep").grads  # noqa: E731
    found = jax.jit(jax.shard_map(work, mesh=mesh, in_specs=P("d"), out_specs=P("d")))(spread(tree(), mesh))
    want = clip(tree(), MaxRms(0.5), scope="tensor").grads
    for ours, theirs in zip(*map(jax.tree.leaves, (found, want)), strict=True):
        assert np.asarray(ours) == pytest.approx(theirs, rel=1e-6)


def test_weights_are_joined_too(mesh):
    work = lambda x, w: clip(x, Ratio(0.1), scope="tensor", weights=w, nonfinite="keep").grads  # noqa: E731
    two = (spread(tree(), mesh), spread(tree(3.0), mesh))
    found = jax.jit(jax.shard_map(work, mesh=mesh, in_specs=(P("d"), P("d")), out_specs=P("d")))(*two)
    want = clip(tree(), Ratio(0.1), scope="tensor", weights=tree(3.0)).grads
    for ours, theirs in zip(*map(jax.tree.leaves, (found, want)), strict=True):
        assert np.asarray(ours) == pytest.approx(theirs, rel=1e-6)


def test_slices_of_parts_are_refused(mesh):
    work = lambda x, w: clip(x, Ratio(0.1), weights=w, nonfinite="keep").grads  # noqa: E731
    with pytest.raises(ValueError, match=r'scope "unit" .* in shard_map'):
        jax.jit(jax.shard_map(work, mesh=mesh, in_specs=(P("d"), P("d")), out_specs=P("d")))(*[spread(tree(), mesh)] * 2)


@pytest.mark.parametrize("p", [2, 3, inf])
def test_the_derivative_goes_through_the_devices(p):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    x = jnp.asarray(tree()["a"])
    norm = jax.shard_map(lambda x: gradclip.norm(x, p=p), mesh=mesh, in_specs=P("d"), out_specs=P())
    assert np.asarray(jax.jit(jax.grad(norm))(x)) == pytest.approx(
        np.asarray(jax.grad(partial(gradclip.norm, p=p))(x)), rel=1e-5
    )


def test_replicated_beside_sharded_counts_once(mesh):
    """What every device holds whole goes into the power divided by their number."""
    grads = tree()

    def reduce(power, p):
        return jax.lax.psum(power, "d")

    @partial(jax.shard_map, mesh=mesh, in_specs=({"a": P("d"), "b": P()},), out_specs=P())
    def norm(grads):
        return clip([grads["a"], grads["b"] / 2], MaxNorm(1.0), nonfinite="keep", reduce=reduce).norm

    placed = {"a": spread(grads["a"], mesh), "b": spread(grads["b"], mesh, P())}
    assert float(jax.jit(norm)(placed)) == pytest.approx(np.sqrt(sum(np.sum(x.astype(float) ** 2) for x in grads.values())))


def test_a_training_step_in_shard_map_keeps_replicas_alike():
    """Each device clips the mean of all gradients, or each by the joined norm: the weights stay the same everywhere."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    optimizer = optax.chain(clipping(MaxNorm(0.2)), optax.adam(0.1))
    random = np.random.default_rng(0)
    xs, ys = random.standard_normal((16, 3)).astype(np.float32), random.standard_normal(16).astype(np.float32)

    def loss(w, x, y):
        return jnp.mean((x @ w - y) ** 2)

    def step(w, state, x, y):
        grads = jax.lax.pmean(jax.grad(loss)(jax.lax.pcast(w, "d", to="varying"), x, y), "d")
        updates, state = optimizer.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    spread_step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("d"), P("d")), out_specs=(P(), P())))
    w = v = jnp.zeros(3)
    state = other = optimizer.init(w)
    for _ in range(5):
        w, state = spread_step(w, state, xs, ys)
        updates, other = optimizer.update(jax.grad(loss)(v, xs, ys), other, v)
        v = optax.apply_updates(v, updates)
    assert np.asarray(w) == pytest.approx(np.asarray(v), rel=1e-5)
    assert float(optax.tree.get(state, "norm")) == pytest.approx(float(optax.tree.get(other, "norm")), rel=1e-5)
    assert int(optax.tree.get(state, "steps_clipped")) == int(optax.tree.get(other, "steps_clipped")) > 0


@pytest.mark.parametrize(
    ("check", "said"),
    [
        (True, {}),
        (True, {"reduce": over("d")}),
        (False, {"reduce": over("d")}),
        (False, {"axis_name": "d"}),
        (True, {"axis_name": ["d"]}),
    ],
)
@pytest.mark.parametrize("p", [2, inf])
def test_fully_sharded(check, said, p):
    """Each device holds a part of the weights, and clips it by the norm of the whole."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    optimizer = optax.chain(clipping(MaxNorm(0.5), p=p, **said), optax.sgd(1.0))
    grads = tree()

    def step(grads):
        return optimizer.update(grads, optimizer.init(grads))[0]

    parts = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=check))(spread(grads, mesh))
    assert float(gradclip.norm(jax.device_get(parts), p=p)) == pytest.approx(0.5, rel=1e-6)


def test_two_ways_of_saying_it_are_refused():
    for make in (clipping, partial(skip, optax.sgd(1.0))):
        with pytest.raises(ValueError, match="axis_name='d'"):
            make(MaxNorm(1.0), axis_name="d", reduce=over("d"))


def test_bounds_in_shard_map(mesh):
    work = lambda x: clip(x, Bounds(-0.5, 0.25), nonfinite="keep", reduce=over("d")).grads  # noqa: E731
    found = jax.jit(jax.shard_map(work, mesh=mesh, in_specs=P("d"), out_specs=P("d")))(spread(tree()["a"], mesh))
    assert np.array_equal(found, tree()["a"].clip(-0.5, 0.25))
