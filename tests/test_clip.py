"""What a caller gives and gets back: trees, kinds of arrays, policies, in place."""

from collections import OrderedDict, defaultdict, namedtuple
from math import inf, isnan, nan

import ml_dtypes
import numpy as np
import pytest

import gradclip
from gradclip import Bounds, MaxNorm, NonFiniteError, clip, clip_
from gradclip.backends import host

Pair = namedtuple("Pair", "left right")


class Kept(list):
    """A list with a class of its own."""


def g(*values, dtype=np.float64):
    return np.array(values, dtype)


def test_the_tree_comes_back_as_it_was():
    tree = {
        "pair": Pair(g(3), None),
        "ordered": OrderedDict(b=g(0), a=[g(0), (g(4),)]),
        "default": defaultdict(list, x=Kept([g(0)])),
        7: (),
    }
    out = clip(tree, MaxNorm(1.0)).grads
    assert type(out["pair"]) is Pair
    assert out["pair"].right is None
    assert type(out["ordered"]) is OrderedDict
    assert list(out["ordered"]) == ["b", "a"]
    assert type(out["default"]) is defaultdict
    assert out["default"].default_factory is list
    assert type(out["default"]["x"]) is Kept
    assert type(out["ordered"]["a"][1]) is tuple
    assert out[7] == ()
    assert out["pair"].left == pytest.approx([0.6])
    assert out["ordered"]["a"][1][0] == pytest.approx([0.8])


def test_containers_are_new_and_the_given_ones_stay():
    tree = {"w": [g(3, 4)]}
    out = clip(tree, MaxNorm(1.0)).grads
    out["w"].append(1)
    assert len(tree["w"]) == 1
    assert tree["w"][0].tolist() == [3, 4]


def test_a_generator_gives_a_list():
    assert clip((g(x) for x in (3, 4)), MaxNorm(1.0)).grads[1] == pytest.approx([0.8])
    assert len(clip({"a": g(1), "b": g(1)}.values(), MaxNorm(1.0)).grads) == 2


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        (np.array([1]), ["a.0", "int64", "float32"]),
        (np.array([True]), ["a.0", "bool"]),
        (np.array([None]), ["a.0", "object"]),
        (np.array(["x"]), ["a.0", "<U1"]),
        (np.array([1], np.longdouble), ["a.0", "float"]),
        (3, ["a.0", "int64"]),
        (True, ["a.0", "bool"]),
        ("text", ["a.0", "builtins.str", "numpy"]),
        ({1.0}, ["a.0", "builtins.set"]),
        (np.ma.array([1.0]), ["a.0", "MaskedArray", "numpy.asarray"]),
    ],
)
def test_what_is_no_gradient_is_refused_by_path(leaf, words):
    with pytest.raises(TypeError) as error:
        clip({"fine": g(1), "a": [leaf]}, MaxNorm(1.0))
    assert all(word in str(error.value) for word in words)


def test_a_tree_that_contains_itself_is_refused():
    tree = []
    tree.append(tree)
    with pytest.raises(ValueError, match="contain themselves"):
        clip(tree, MaxNorm(1.0))


def test_no_helper_is_taken_for_a_framework():
    kind = type("Tensor", (), {"__module__": "native.core"})
    with pytest.raises(TypeError, match=r"arrays of [a-z, ]*numpy[a-z, ]*, alone"):
        clip([kind()], MaxNorm(1.0))


class Stubborn(tuple):
    """A tuple that cannot be made of one list."""

    def __new__(cls, a, b):
        return super().__new__(cls, (a, b))


def test_a_tree_that_cannot_be_made_anew_is_left_as_it_was():
    deep = leaf = g(3, 4)
    for _ in range(3000):
        deep = {"a": deep}
    with pytest.raises(ValueError, match="nested too deeply"):
        clip_(deep, MaxNorm(1.0))
    with pytest.raises(TypeError):
        clip_(Stubborn(leaf, 3.0), MaxNorm(1.0))
    assert leaf.tolist() == [3, 4]
    whole = Stubborn(leaf, g(12))
    assert clip_(whole, MaxNorm(6.5)).grads is whole  # in place: nothing is made anew
    assert leaf.tolist() == [1.5, 2]


def test_repeated_memory_is_clamped_once():
    z = (np.random.default_rng(1).normal(size=10**5) + 1j * np.random.default_rng(2).normal(size=10**5)).astype(np.complex64)
    want = clip([z, z], MaxNorm(0.5), scope="element").grads[0]
    clip_([z, z], MaxNorm(0.5), scope="element")
    assert np.array_equal(z, want)


def test_two_frameworks_in_one_call_are_refused(monkeypatch):
    import sys
    import types

    from gradclip import backends

    other = types.ModuleType("gradclip.backends.otherframe")
    monkeypatch.setitem(sys.modules, other.__name__, other)
    monkeypatch.setattr(backends, "NAMES", backends.NAMES | {"otherframe"})
    kind = type("Tensor", (), {"__module__": "otherframe.core"})
    with pytest.raises(TypeError, match=r"numpy \(w\) and otherframe \(b\)"):
        clip({"w": g(1), "b": kind()}, MaxNorm(1.0))


def test_none_keeps_its_slot():
    clipped = clip([g(3), None, g(4)], MaxNorm(1.0), scope="tensor")
    assert clipped.norm.tolist() == [3, 0, 4]
    assert clipped.coef.tolist() == [1 / 3, 1, 1 / 4]
    assert clipped.limit.tolist() == [1, 1, 1]
    assert clipped.grads[1] is None
    assert clipped.to_dict()["norm"] == {"0": 3.0, "1": 0.0, "2": 4.0}


@pytest.mark.parametrize("scope", ["global", "tensor", "element"])
@pytest.mark.parametrize("tree", [[], {}, (), None, [None], [np.zeros((0, 3))], [np.zeros(0), np.float32(0)]])
@pytest.mark.parametrize("p", [1, 2, 3.5, inf])
def test_nothing_to_clip(scope, tree, p):
    clipped = clip(tree, MaxNorm(1.0), scope=scope, p=2 if scope == "element" else p)
    assert not clipped.clipped
    assert clipped.finite
    assert not np.any(clipped.norm)


def test_python_floats_and_scalars_count_as_numpy():
    out = clip([3.0, np.float32(4.0), 0j], MaxNorm(1.0)).grads
    assert type(out[0]) is float
    assert type(out[1]) is np.float32
    assert type(out[2]) is complex
    assert clip(3.0, MaxNorm(1.0)).grads == 1.0


def test_a_zero_dimensional_array_stays_one():
    out = clip(np.array(3.0, np.float32), MaxNorm(1.0)).grads
    assert out.shape == ()
    assert isinstance(out, np.ndarray)


LAYOUTS = {
    "fortran": lambda x: np.asfortranarray(x),
    "transposed": lambda x: np.ascontiguousarray(x.transpose(2, 0, 1)).transpose(1, 2, 0),
    "strided": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "reversed": lambda x: x[::-1, :, ::-1].copy()[::-1, :, ::-1],
    "readonly": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
    "unaligned": lambda x: np.frombuffer(b"." + x.tobytes(), np.uint8)[1:].copy()[:].view(x.dtype).reshape(x.shape),
    "broadcast": lambda x: np.broadcast_to(x[:, :1, :1], x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.complex64, np.complex128])
@pytest.mark.parametrize("scope", ["global", "element"])
def test_every_layout_gives_what_the_plain_one_gives(layout, dtype, scope):
    plain = np.random.default_rng(0).normal(size=(5, 4, 3)).astype(dtype)
    if layout == "broadcast":
        plain = np.broadcast_to(plain[:, :1, :1], plain.shape).copy()
    given = LAYOUTS[layout](plain)
    before = given.copy()
    want, got = (clip(x, MaxNorm(0.5), scope=scope) for x in (plain, given))
    assert np.array_equal(want.grads, got.grads)
    assert got.grads.dtype == plain.dtype
    assert float(got.norm) == pytest.approx(float(want.norm), rel=1e-15)
    assert np.array_equal(given, before), "clip never writes to what it is given"
    assert not np.shares_memory(given, got.grads)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.complex64])
@pytest.mark.parametrize("layout", ["fortran", "transposed", "strided", "reversed"])
@pytest.mark.parametrize("scope", ["global", "element"])
def test_in_place_equals_out_of_place(layout, dtype, scope):
    plain = np.random.default_rng(0).normal(size=(5, 4, 3)).astype(dtype)
    given = LAYOUTS[layout](plain.copy())
    want = clip(plain, MaxNorm(0.5), scope=scope).grads
    got = clip_(given, MaxNorm(0.5), scope=scope)
    assert got.grads is given
    assert np.array_equal(given, want)


def test_big_endian_and_memory_mapped_arrays(tmp_path):
    swapped = np.array([3, 4], ">f4")
    assert clip(swapped, MaxNorm(1.0)).grads.dtype == np.dtype(">f4")
    mapped = np.memmap(tmp_path / "g", np.float32, "w+", shape=2)
    mapped[:] = [3, 4]
    assert clip_(mapped, MaxNorm(1.0)).grads is mapped
    assert mapped == pytest.approx([0.6, 0.8])


def test_mixed_dtypes_share_one_norm_and_keep_their_types():
    tree = [g(3, dtype=np.float16), g(4, dtype=np.float64), g(12, dtype=np.float32)]
    clipped = clip(tree, MaxNorm(1.0))
    assert clipped.norm == 13
    assert [x.dtype for x in clipped.grads] == [np.float16, np.float64, np.float32]


@pytest.mark.parametrize("rule", [MaxNorm(13.0), MaxNorm(inf), MaxNorm(14.0, min_norm=1.0), MaxNorm(13.0, like="paddle")])
def test_not_clipped_means_the_very_same_arrays(rule):
    tree = {"a": g(3, 4), "b": g(12, dtype=np.float32)}
    clipped = clip(tree, rule)
    assert clipped.grads["a"] is tree["a"]
    assert clipped.grads["b"] is tree["b"]
    assert clipped.coef == 1
    assert not clipped.clipped


@pytest.mark.parametrize("rule", [MaxNorm(12.0), Bounds(-1.0, 12.0), Bounds(-inf, inf)])
def test_values_inside_the_bounds_are_the_very_same_arrays(rule):
    tree = [g(3, -1), g(12, dtype=np.float32)]
    assert all(new is old for new, old in zip(clip(tree, rule, scope="element").grads, tree, strict=True))


def test_only_the_tensors_above_the_limit_are_new():
    small, large = g(0.1), g(5)
    out = clip([small, large], MaxNorm(1.0), scope="tensor").grads
    assert out[0] is small
    assert out[1] == 1


def test_nothing_is_written_where_nothing_changes(monkeypatch):
    def write(xs, *arguments):
        if xs:
            raise AssertionError("written")
        return []

    for name in ("_scale_into", "_clamp_into", "zero_"):
        monkeypatch.setattr(host, name, write)
    tree = [g(3, 4), g(nan)]
    clip_(tree[0], MaxNorm(5.0))
    clip_(tree[0], MaxNorm(4.0), scope="element")
    clip_(tree, MaxNorm(1.0), nonfinite="skip")
    for scope in ("global", "element"):
        with pytest.raises(AssertionError, match="written"):
            clip_(tree[0], MaxNorm(1.0), scope=scope)


def test_one_array_in_two_places_counts_twice_and_is_written_once():
    shared = g(3, 4)
    clipped = clip_({"a": shared, "b": shared, "c": shared.reshape(2, 1).T}, MaxNorm(1.0))
    assert clipped.norm == pytest.approx(75**0.5)
    assert shared == pytest.approx(np.array([3, 4]) / 75**0.5)
    assert clipped.grads["a"] is shared


def test_one_array_in_two_places_by_its_own_norm_and_by_value():
    shared = g(3, 4)
    clip_([shared, shared], MaxNorm(1.0), scope="tensor")
    assert shared == pytest.approx([0.6, 0.8])
    clip_([shared, shared], MaxNorm(0.7), scope="element")
    assert shared == pytest.approx([0.6, 0.7])


def test_memory_shared_in_part_is_refused_before_anything_is_written():
    base = np.arange(10.0)
    for other in (base[3:8], base[::2], base.view(np.complex128), base[::-1][2:]):
        with pytest.raises(ValueError, match="'a' and 'b' share"):
            clip_({"a": base[:9] if other.dtype == base.dtype else base, "b": other}, MaxNorm(1.0))
    assert base.tolist() == list(range(10))


def test_interleaved_arrays_share_nothing():
    base = np.ones((4, 4))
    clip_([base[:, :2], base[:, 2:], base[:0]], MaxNorm(2.0))
    assert base == pytest.approx(np.full((4, 4), 0.5))


def test_an_array_in_two_places_is_written_once_beside_a_none():
    x = np.array([3.0, 4.0])
    gradclip.clip_({"a": x, "b": x, "c": None}, MaxNorm(1.0))
    assert np.linalg.norm([x, x]) == pytest.approx(1.0, rel=1e-15)


def test_an_array_in_two_places_is_written_once_by_each_of_two_factors():
    x = np.array([3e200, 4e200])
    gradclip.clip_([x, x], MaxNorm(1e-100))
    assert np.linalg.norm(x / 1e-100) == pytest.approx(0.5**0.5, rel=1e-14)


def test_an_array_that_reaches_one_element_twice_is_refused():
    windows = np.lib.stride_tricks.as_strided(np.ones(5), (3, 3), (8, 8))
    with pytest.raises(ValueError, match="two indices"):
        clip_(windows, MaxNorm(1.0))


@pytest.mark.parametrize("leaf", [3.0, np.float32(3)])
def test_what_cannot_be_written_is_refused_in_place(leaf):
    with pytest.raises(TypeError, match=r"'w'.*use clip"):
        clip_({"w": leaf}, MaxNorm(1.0))


def test_a_read_only_array_is_refused_in_place_and_nothing_is_written():
    writable, locked = g(3), g(4)
    locked.flags.writeable = False
    with pytest.raises(ValueError, match="'1' is read-only"):
        clip_([writable, locked], MaxNorm(1.0))
    assert writable == 3


BAD = {"nan": nan, "inf": inf, "minus inf": -inf}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("scope", ["global", "tensor", "element"])
@pytest.mark.parametrize("in_place", [False, True])
class TestNonFinite:
    def run(self, bad, scope, in_place, policy, p=2):
        self.given = {"a": g(3, BAD[bad]), "b": [g(4)]}
        self.before = [self.given["a"].tobytes(), self.given["b"][0].tobytes()]
        return (clip_ if in_place else clip)(self.given, MaxNorm(1.0), scope=scope, p=p, nonfinite=policy)

    def untouched(self):
        return [self.given["a"].tobytes(), self.given["b"][0].tobytes()] == self.before

    def test_raise_names_the_leaf_and_changes_nothing(self, bad, scope, in_place):
        with pytest.raises(NonFiniteError, match=r"a \(1 (NaN|inf) of 2\).*nonfinite=") as error:
            self.run(bad, scope, in_place, "raise")
        assert isinstance(error.value, FloatingPointError)
        assert isinstance(error.value, RuntimeError)
        assert "b.0" not in str(error.value)
        assert self.untouched()

    def test_zero_gives_zeros_never_zero_times_nan(self, bad, scope, in_place):
        clipped = self.run(bad, scope, in_place, "zero")
        assert clipped.grads["a"].tolist() == [0, 0]
        assert clipped.grads["b"][0].tolist() == [0]
        assert (bool(clipped.clipped), bool(clipped.finite), bool(clipped.skipped)) == (True, False, False)
        assert (clipped.grads["a"] is self.given["a"]) == in_place

    def test_skip_leaves_everything_and_says_so(self, bad, scope, in_place):
        clipped = self.run(bad, scope, in_place, "skip")
        assert clipped.grads["a"] is self.given["a"]
        assert (bool(clipped.clipped), bool(clipped.finite), bool(clipped.skipped)) == (False, False, True)
        assert self.untouched()

    def test_keep_spreads_as_in_the_frameworks(self, bad, scope, in_place):
        clipped = self.run(bad, scope, in_place, "keep")
        a, b = clipped.grads["a"], clipped.grads["b"][0]
        assert not clipped.finite
        assert not clipped.skipped
        if scope == "element":
            assert a[0] == b[0] == 1
            assert isnan(a[1]) if bad == "nan" else a[1] == np.sign(BAD[bad])
        else:
            assert isnan(a[1])
            assert isnan(a[0]) if bad == "nan" else a[0] == 0
            assert b[0] == 1 if scope == "tensor" else (isnan(b[0]) if bad == "nan" else b[0] == 0)
            assert isnan(np.ravel(clipped.coef)[0]) if bad == "nan" else np.ravel(clipped.coef)[0] == 0


@pytest.mark.parametrize("p", [0.5, 1, 2, 3, inf])
@pytest.mark.parametrize("where", [0, 1])
def test_nan_is_found_for_every_p_wherever_it_stands(p, where):
    grads = [g(1, 2), g(3, 4)]
    grads[where][1] = nan
    assert isnan(gradclip.norm(grads, p))
    assert isnan(clip(grads, MaxNorm(1.0), p=p, nonfinite="keep").coef)
    with pytest.raises(NonFiniteError):
        clip(grads, MaxNorm(1.0), p=p)


def test_many_leaves_that_are_not_finite_are_named_in_part():
    with pytest.raises(NonFiniteError, match=r"0 \(1 NaN of 1\).* and 3 more"):
        clip([g(nan)] * 8, MaxNorm(1.0))


def test_reduce_joins_processes():
    ours = [g(3), g(0)]
    joined = clip(ours, MaxNorm(1.0), reduce=lambda power, p: power + 4**p + 12**p)
    assert joined.norm == 13
    assert joined.grads[0] == pytest.approx([3 / 13])
    by_tensor = clip(ours, MaxNorm(1.0), scope="tensor", reduce=lambda power, p: power + np.array([4.0, 12.0]) ** p)
    assert by_tensor.norm.tolist() == [5, 12]


def test_reduce_of_a_maximum_carries_nan_beside_it():
    seen = []

    def reduce(values, p):
        seen.append((values.tolist(), p))
        return np.maximum(values, [7.0, 1.0])

    clipped = clip([g(3)], MaxNorm(1.0), p=inf, reduce=reduce, nonfinite="keep")
    assert seen == [([3.0, 0.0], inf)]
    assert isnan(clipped.norm)
    with pytest.raises(NonFiniteError, match="every gradient here is finite"):
        clip([g(3)], MaxNorm(1.0), p=inf, reduce=reduce)


def test_reduce_gets_arrays_and_its_answer_is_checked():
    def doubled(power, p):
        assert isinstance(power, np.ndarray)
        return np.multiply(power, 2, out=power)

    assert clip([g(3), g(4)], MaxNorm(1.0), reduce=doubled).norm == pytest.approx(50**0.5)
    for wrong, error in (
        (lambda w, p: w.reshape(1), ValueError),
        (lambda w, p: -w, ValueError),
        (lambda w, p: None, TypeError),
    ):
        with pytest.raises(error, match="reduce="):
            clip([g(3), g(4)], MaxNorm(1.0), reduce=wrong)


def test_reduce_keeps_the_range():
    clipped = clip([g(1e200)], MaxNorm(1.0), reduce=lambda power, p: power * 4 if p == 2 else power)
    assert clipped.norm == pytest.approx(2e200)


def test_norm_replaces_measuring():
    assert clip([g(3)], MaxNorm(1.0), norm=6.0).grads[0] == 0.5
    assert clip([g(3), g(1)], MaxNorm(1.0), scope="tensor", norm=[6.0, 1.0]).grads[0] == 0.5
    for bad in ([1.0], -1.0):
        with pytest.raises(ValueError, match="norm="):
            clip([g(3), g(4)], MaxNorm(1.0), norm=bad)
    with pytest.raises(ValueError, match="pass one of them"):
        clip([g(3)], MaxNorm(1.0), norm=3.0, reduce=lambda power, p: power)
    with pytest.raises(NonFiniteError, match="given so"):
        clip([g(3)], MaxNorm(1.0), norm=nan)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"scope": "layer"}, ValueError, "'global', 'tensor', 'element'"),
        ({"nonfinite": "ignore"}, ValueError, "'raise', 'zero', 'skip', 'keep'"),
        ({"p": 0}, ValueError, "p must be"),
        ({"p": -1}, ValueError, "p must be"),
        ({"p": nan}, ValueError, "p must be"),
        ({"p": "inf"}, TypeError, "'inf'"),
        ({"p": True}, TypeError, "bool"),
        ({"scope": "element", "p": 3}, ValueError, "element"),
        ({"scope": "element", "norm": 1.0}, ValueError, "element"),
        ({"state": (1, 2)}, ValueError, "2 entries, not 0"),
        ({"state": 5}, TypeError, "state= is a tuple"),
        ({"norm": "5"}, TypeError, "norm= must be real numbers"),
        ({"norm": 5j}, TypeError, "norm= must be real numbers"),
        ({"nonfinite": np.zeros(2)}, ValueError, "nonfinite must be one of"),
    ],
)
def test_wrong_arguments_say_what_is_accepted(wrong, error, words):
    with pytest.raises(error, match=words):
        clip([g(1)], MaxNorm(1.0), **wrong)


def test_a_number_is_no_rule():
    with pytest.raises(TypeError, match=r"MaxNorm\(1.0\)"):
        clip([g(1)], 1.0)


def test_bounds_clip_values_on_both_sides():
    given = [g(-3, -1, 0, 1, 3), g(-3, dtype=np.float32)]
    clipped = clip(given, Bounds(-2.0, 1.0))
    assert clipped.grads[0].tolist() == [-2, -1, 0, 1, 1]
    assert clipped.grads[1] == -2
    assert clipped.norm == 3
    assert clipped.limit == 2
    assert clipped.coef is None
    with pytest.raises(TypeError, match="w is complex"):
        clip({"w": g(1j, dtype=np.complex64)}, Bounds(-1.0, 1.0))


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_complex_gradients_go_by_their_modulus(dtype):
    given = g(3 + 4j, 0.3 - 0.4j, 12j, dtype=dtype)
    assert gradclip.norm(given) == pytest.approx(13.0096118, rel=1e-8)
    assert gradclip.norm(given, p=1) == pytest.approx(17.5)
    by_value = clip(given, MaxNorm(1.0), scope="element").grads
    assert by_value == pytest.approx(g(0.6 + 0.8j, 0.3 - 0.4j, 1j, dtype=dtype), rel=1e-6)
    assert clip(given, MaxNorm(1.0)).grads.dtype == dtype
    assert gradclip.norm(clip(given, MaxNorm(1.0)).grads) == pytest.approx(1, rel=1e-6)


def test_min_norm_raises_a_small_norm_and_leaves_zero():
    rule = MaxNorm(10.0, min_norm=1.0)
    assert clip([g(0.3, 0.4)], rule).grads[0] == pytest.approx([0.6, 0.8])
    assert clip([g(0.3, 0.4)], rule).limit == 1
    zeros = g(0, 0)
    assert clip([zeros], rule).grads[0] is zeros
    assert clip([g(0.5), g(0), g(50)], rule, scope="tensor").grads == [1, 0, 10]


def test_what_a_clip_says_of_itself():
    clipped = clip([g(3), g(4), g(12)], MaxNorm(1.0))
    assert repr(clipped) == "norm 13.0 → 1.0 (×0.0769), 3 tensors, clipped"
    assert repr(clip(g(1), MaxNorm(1.0))) == "norm 1.0, 1 tensor"
    assert repr(clip([g(3), None], MaxNorm(1.0), scope="tensor")) == "largest norm 3.0 → 1.0, 1 tensor, clipped"
    assert repr(clip([g(3)], MaxNorm(1.0), scope="element")) == "largest value 3.0 → 1.0, 1 tensor, clipped"
    assert repr(clip([g(inf)], MaxNorm(1.0), nonfinite="zero")) == "norm inf, 1 tensor, clipped, not finite"
    for values in ((5, nan), (nan, 5)):
        tensors = clip([g(x) for x in values], MaxNorm(1.0), scope="tensor", nonfinite="keep")
        assert repr(tensors) == "largest norm nan, 2 tensors, clipped, not finite"
    assert repr(clip([g(nan)], MaxNorm(1.0), nonfinite="skip")) == "norm nan, 1 tensor, skipped, not finite"
    assert clipped.to_dict() == {
        "norm": 13.0,
        "limit": 1.0,
        "coef": 1 / 13,
        "clipped": True,
        "finite": True,
        "skipped": False,
    }


def test_to_dict_is_json_and_loses_no_path():
    import json

    tree = {"a.b": g(3), "a": {"b": g(nan)}, "a.b#2": g(1)}
    said = clip(tree, MaxNorm(inf), scope="tensor", nonfinite="skip").to_dict()
    assert said["norm"] == {"a.b": 3.0, "a.b#2": None, "a.b#2#2": 1.0}
    assert said["limit"] == {"a.b": None, "a.b#2": None, "a.b#2#2": None}
    assert json.loads(json.dumps(said, allow_nan=False)) == said


def test_the_fields_are_arrays():
    for scope in ("global", "tensor", "element"):
        clipped = clip([g(3), g(4)], MaxNorm(1.0), scope=scope)
        shape = (2,) if scope == "tensor" else ()
        for name in ("norm", "limit") + (("coef",) if scope != "element" else ()):
            field = getattr(clipped, name)
            assert isinstance(field, np.ndarray)
            assert field.shape == shape
            assert field.dtype == np.float64
        for name in ("clipped", "finite", "skipped"):
            assert getattr(clipped, name).dtype == bool
            assert getattr(clipped, name).shape == ()


def test_the_three_named_ways():
    tree = [g(3, 4), g(12)]
    assert gradclip.clip_by_value(tree, 3.5).grads[0].tolist() == [3, 3.5]
    assert gradclip.clip_by_value(tree, (-1.0, 2.0)).grads[1] == 2
    assert gradclip.clip_by_value(tree, [-1.0, 2.0]).grads[1] == 2
    with pytest.raises(ValueError, match=r"\(low, high\)"):
        gradclip.clip_by_value(tree, (1, 2, 3))
    assert [x.tolist() for x in gradclip.clip_by_norm(tree, 6.0).grads] == [[3, 4], [6]]
    assert gradclip.clip_by_global_norm(tree, 1.0).norm == 13
    assert gradclip.clip_by_norm(tree, 1.0, p=1).norm.tolist() == [7, 12]
    assert gradclip.clip_by_global_norm(tree, 1.0, p=inf).norm == 12


def test_norm_measures():
    tree = {"a": g(3, 4), "b": None, "c": g(-12)}
    assert gradclip.norm(tree) == 13
    assert gradclip.norm(tree, p=1) == 19
    assert gradclip.norm(tree, p=inf) == 12
    assert gradclip.norm(tree, scope="tensor").tolist() == [5, 0, 12]
    assert gradclip.norm(tree, scope="element") == 12
    with pytest.raises(ValueError, match="scope must be one of"):
        gradclip.norm(tree, scope="layer")
    with pytest.raises(ValueError, match="every value by itself"):
        gradclip.norm(tree, p=1, scope="element")
