"""Functions of jax, flax and optax whose primitives must have rules, with arguments."""

# ruff: noqa: B008, SIM905 - tables of functions are what this file is

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.scipy import special

Traced = tuple[str, Callable[..., Any], tuple[Any, ...]]


def _quantized(values: np.ndarray) -> jax.Array:
    """Of few bits, so that sums of parts are exact."""
    return jnp.asarray(np.round(values * 512) / 512, jnp.float32)


x = _quantized(np.random.default_rng(0).normal(size=(4, 6)))
p = _quantized(np.random.default_rng(1).uniform(0.1, 0.9, size=(4, 6)))
v = x[0]
i = jnp.asarray(np.random.default_rng(2).integers(0, 4, size=(4, 6)), jnp.int32)
b = x > 0
c = x + 1j * p
s = x[:, :4] @ x[:, :4].T + 4 * jnp.eye(4)
image = jnp.ones((2, 8, 8, 3))
key = jax.random.key(0)

_FLOAT_1 = """
    abs absolute acos acosh angle asin asinh atan atanh average cbrt ceil conj cos cosh cumprod
    cumsum deg2rad degrees diagonal diff ediff1d exp exp2 expm1 fabs fix flip fliplr flipud
    floor gradient i0 imag isfinite isinf isnan isneginf isposinf isreal log log10 log1p log2
    max mean median min nancumsum nanmax nanmean nanmedian nanmin nanprod nanstd nansum nanvar
    negative positive prod ptp rad2deg radians ravel real reciprocal rint rot90 round sign
    signbit sin sinc sinh sqrt square std sum tan tanh trace transpose tril triu trunc var
    vander argmax argmin argsort sort all any count_nonzero cov corrcoef nan_to_num nanargmax
    nanargmin spacing frexp modf unwrap trapezoid diag diagflat atleast_3d ones_like zeros_like
    logical_not
""".split()
_FLOAT_2 = """
    add arctan2 copysign divide divmod equal float_power floor_divide fmax fmin fmod greater
    greater_equal heaviside hypot inner isclose kron less less_equal logaddexp logaddexp2
    logical_and logical_or logical_xor matvec maximum minimum mod multiply nextafter not_equal
    outer power remainder subtract true_divide vdot polyadd polymul convolve correlate cross
    interp dot array_equal append concatenate stack hstack vstack dstack searchsorted digitize
""".split()
_INT = ["bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift", "gcd", "lcm"]
_NOT_SQUARE = {"dot": lambda f: f(x, x.T), "vdot": lambda f: f(v, v), "matvec": lambda f: f(x, v)}


def _numpy() -> Iterator[Traced]:
    for name in _FLOAT_1:
        if hasattr(jnp, name):
            arg = v if name in ("vander", "diag", "diagflat", "i0") else x
            yield f"jnp.{name}", getattr(jnp, name), (arg,)
    for name in _FLOAT_2:
        fn = getattr(jnp, name)
        if name in ("convolve", "correlate", "polyadd", "polymul", "kron", "outer", "vdot"):
            args: tuple[Any, ...] = (v, v)
        elif name == "dot":
            args = (x, x.T)
        elif name == "matvec":
            args = (x, v)
        elif name == "cross":
            args = (x[:, :3], p[:, :3])
        elif name == "interp":
            args = (v, v, v)
        elif name in ("searchsorted", "digitize"):
            args = (v, v)
        elif name in ("concatenate", "stack", "hstack", "vstack", "dstack"):
            yield f"jnp.{name}", lambda a, c, f=fn: f([a, c]), (x, p)
            continue
        else:
            args = (x, p)
        yield f"jnp.{name}", fn, args
    for name in _INT:
        yield f"jnp.{name}", getattr(jnp, name), (i, i)
    more: dict[str, Callable[[], Any] | Any] = {
        "bitwise_not": (jnp.bitwise_not, i),
        "bitwise_count": (jnp.bitwise_count, i),
        "where": (jnp.where, b, x, p),
        "clip": (lambda a: jnp.clip(a, -1, 1), x),
        "roll": (lambda a: jnp.roll(a, 1, 0), x),
        "pad": (lambda a: jnp.pad(a, 1), x),
        "pad reflect": (lambda a: jnp.pad(a, 1, mode="reflect"), x),
        "pad wrap": (lambda a: jnp.pad(a, 1, mode="wrap"), x),
        "tile": (lambda a: jnp.tile(a, (2, 2)), x),
        "repeat": (lambda a: jnp.repeat(a, 2, 0), x),
        "take": (lambda a, j: jnp.take(a, j, axis=0), x, i),
        "take_along_axis": (lambda a, j: jnp.take_along_axis(a, j, axis=0), x, i),
        "index": (lambda a, j: a[j, j], x, i),
        "slice step": (lambda a: a[1:, ::2], x),
        "at add": (lambda a, j: a.at[j].add(1.0), x, i[:, 0]),
        "at set": (lambda a, j: a.at[j].set(1.0), x, i[:, 0]),
        "at max": (lambda a, j: a.at[j].max(1.0), x, i[:, 0]),
        "at min": (lambda a, j: a.at[j].min(1.0), x, i[:, 0]),
        "at multiply": (lambda a, j: a.at[j].multiply(2.0, unique_indices=True), x, i[:, 0]),
        "at apply": (lambda a, j: a.at[j].apply(jnp.sin), x, i[:, 0]),
        "einsum": (lambda a, d: jnp.einsum("ij,kj->ik", a, d), x, p),
        "tensordot": (lambda a, d: jnp.tensordot(a, d, 2), x, p),
        "matmul batched": (lambda a: a[None] @ a.T[None], x),
        "vecdot": (jnp.vecdot, x, p),
        "meshgrid": (lambda a: jnp.meshgrid(a, a), v),
        "arange": (lambda: jnp.arange(8),),
        "linspace": (lambda: jnp.linspace(0.0, 1.0, 8),),
        "eye": (lambda: jnp.eye(4),),
        "tri": (lambda: jnp.tri(4),),
        "logspace": (lambda: jnp.logspace(0.0, 1.0, 8),),
        "quantile": (lambda a: jnp.quantile(a, 0.3), x),
        "percentile": (lambda a: jnp.percentile(a, 30.0, axis=0), x),
        "histogram": (lambda a: jnp.histogram(a)[0], v),
        "bincount": (lambda j: jnp.bincount(j, length=4), i[0]),
        "nonzero": (lambda a: jnp.nonzero(a, size=4), x),
        "unique": (lambda a: jnp.unique(a, size=4), i),
        "split": (lambda a: jnp.split(a, 2), x),
        "array_split": (lambda a: jnp.array_split(a, 3), x),
        "moveaxis": (lambda a: jnp.moveaxis(a, 0, 1), x),
        "polyval": (jnp.polyval, v, v),
        "select": (lambda a, d: jnp.select([a > 0, d > 0], [a, d]), x, p),
        "piecewise": (lambda a: jnp.piecewise(a, [a < 0, a >= 0], [-1.0, 1.0]), x),
        "lexsort": (lambda a: jnp.lexsort((a, a)), v),
        "partition": (lambda a: jnp.partition(a, 1), x),
        "argpartition": (lambda a: jnp.argpartition(a, 1), x),
        "cumulative_sum": (lambda a: jnp.cumulative_sum(a, axis=0), x),
        "cumulative_prod": (lambda a: jnp.cumulative_prod(a, axis=0), x),
        "cummax": (lambda a: lax.cummax(a), x),
        "cumlogsumexp": (lambda a: lax.cumlogsumexp(a), x),
        "apply_along_axis": (lambda a: jnp.apply_along_axis(jnp.sum, 0, a), x),
        "packbits": (jnp.packbits, b),
        "unpackbits": (jnp.unpackbits, i.astype(jnp.uint8)),
        "view": (lambda a: a.view(jnp.int32), x),
        "astype": (lambda a: a.astype(jnp.bfloat16), x),
        "dynamic_slice": (lambda a, j: lax.dynamic_slice(a, (j[0, 0], 0), (2, 6)), x, i),
        "dynamic_update": (lambda a, j: lax.dynamic_update_slice(a, a[:2], (j[0, 0], 0)), x, i),
        "top_k": (lambda a: lax.top_k(a, 2), x),
        "approx_max_k": (lambda a: lax.approx_max_k(a, 2)[0], x),
        "sort pairs": (lambda a, d: lax.sort((a, d), num_keys=1), x, p),
        "population_count": (lax.population_count, i),
        "clz": (lax.clz, i),
        "reduce_precision": (lambda a: lax.reduce_precision(a, 8, 7), x),
        "reduce": (lambda a: lax.reduce(a, 0.0, lambda a, b: a * b + b, (0,)), x),
        "ragged_dot": (
            lambda a, w: lax.ragged_dot(a, w, jnp.asarray([1, 3], jnp.int32)),
            x,
            jnp.ones((2, 6, 5)),
        ),
        "dot bf16": (
            lambda a: lax.dot(
                a.astype(jnp.bfloat16), a.T.astype(jnp.bfloat16), preferred_element_type=jnp.float32
            ),
            x,
        ),
        "reduce_and": (lambda a: lax.reduce_and_p.bind(a, axes=(0,)), b),
        "reduce_xor": (lambda a: lax.reduce_xor(a, (0,)), i),
        "custom_root": (
            lambda a: lax.custom_root(
                lambda y: y**3 - a, a, lambda f, g: g, lambda f, g: g / f(1.0)
            ),
            x[0, 0],
        ),
        "map": (lambda a: lax.map(jnp.sin, a), x),
        "associative_scan": (lambda a: lax.associative_scan(jnp.add, a), x),
        "remat": (jax.checkpoint(lambda a: jnp.sin(jnp.sin(a))), x),
        "isin": (jnp.isin, i, i[0]),
        "fill_diagonal": (lambda a: jnp.fill_diagonal(a, 0.0, inplace=False), x),
        "block": (lambda a: jnp.block([[a, a], [a, a]]), x),
    }
    for name, (fn, *args) in more.items():
        yield f"jnp.{name}", fn, tuple(args)


def _nn() -> Iterator[Traced]:
    names = (
        "relu relu6 sigmoid softplus sparse_plus sparse_sigmoid soft_sign silu swish log_sigmoid "
        "leaky_relu hard_sigmoid hard_silu hard_tanh elu celu selu gelu squareplus mish softmax "
        "log_softmax logsumexp standardize identity"
    )
    for name in names.split():
        yield f"nn.{name}", getattr(jax.nn, name), (x,)
    yield "nn.gelu exact", lambda a: jax.nn.gelu(a, approximate=False), (x,)
    yield "nn.glu", jax.nn.glu, (x,)
    yield "nn.one_hot", lambda j: jax.nn.one_hot(j, 4), (i,)
    yield "nn.attention", lambda q: jax.nn.dot_product_attention(q, q, q, is_causal=True), (image,)
    yield "nn.logmeanexp", jax.nn.logmeanexp, (x,)


def _random() -> Iterator[Traced]:
    draws: dict[str, Callable[[jax.Array], Any]] = {
        name: (lambda k, f=getattr(jax.random, name): f(k, shape=(4, 6)))
        for name in """
            bits uniform normal exponential gumbel laplace logistic cauchy rademacher maxwell
            bernoulli
        """.split()
    }
    draws["truncated_normal"] = lambda k: jax.random.truncated_normal(k, -1.0, 1.0, (4, 6))
    draws["rayleigh"] = lambda k: jax.random.rayleigh(k, 1.0, (4, 6))
    draws["randint"] = lambda k: jax.random.randint(k, (4, 6), 0, 9)
    draws["gamma"] = lambda k: jax.random.gamma(k, p)
    draws["loggamma"] = lambda k: jax.random.loggamma(k, p)
    draws["beta"] = lambda k: jax.random.beta(k, p, p)
    draws["dirichlet"] = lambda k: jax.random.dirichlet(k, p)
    draws["poisson"] = lambda k: jax.random.poisson(k, p)
    draws["binomial"] = lambda k: jax.random.binomial(k, 5.0, p)
    draws["geometric"] = lambda k: jax.random.geometric(k, p)
    draws["t"] = lambda k: jax.random.t(k, p)
    draws["f"] = lambda k: jax.random.f(k, p, p)
    draws["chisquare"] = lambda k: jax.random.chisquare(k, p)
    draws["pareto"] = lambda k: jax.random.pareto(k, p)
    draws["weibull_min"] = lambda k: jax.random.weibull_min(k, 1.0, 1.0, (4,))
    draws["wald"] = lambda k: jax.random.wald(k, p)
    draws["triangular"] = lambda k: jax.random.triangular(k, 0.0, 0.5, 1.0, (4,))
    draws["lognormal"] = lambda k: jax.random.lognormal(k, 1.0, (4,))
    draws["double_sided_maxwell"] = lambda k: jax.random.double_sided_maxwell(k, 0.0, 1.0, (4,))
    draws["generalized_normal"] = lambda k: jax.random.generalized_normal(k, 1.0, (4,))
    draws["ball"] = lambda k: jax.random.ball(k, 3)
    draws["orthogonal"] = lambda k: jax.random.orthogonal(k, 3)
    draws["multivariate_normal"] = lambda k: jax.random.multivariate_normal(k, v[:4], s)
    draws["multinomial"] = lambda k: jax.random.multinomial(k, 5.0, jnp.ones(3) / 3)
    draws["categorical"] = lambda k: jax.random.categorical(k, x)
    draws["choice"] = lambda k: jax.random.choice(k, v, (3,), replace=False)
    draws["permutation"] = lambda k: jax.random.permutation(k, x)
    draws["split"] = lambda k: jax.random.split(k, 3)
    draws["fold_in"] = lambda k: jax.random.fold_in(k, 3)
    draws["key_data"] = lambda k: jax.random.wrap_key_data(
        jax.random.key_data(jax.random.split(k, 4))
    )
    draws["rng_bit_generator"] = lambda k: lax.rng_bit_generator(
        jax.random.key_data(jax.random.key(0, impl="rbg")), (4,)
    )
    draws["seed"] = lambda k: jax.random.key(jnp.int32(3))
    draws["clone"] = jax.random.clone
    for name, fn in draws.items():
        yield f"random.{name}", fn, (key,)


def _special() -> Iterator[Traced]:
    one = (
        "bernoulli digamma entr erf erfc erfinv exp1 expi expit factorial gammaln gamma i0 "
        "i0e i1 i1e log_ndtr log_softmax logit logsumexp ndtr ndtri rel_entr softmax spence "
        "xlog1py xlogy zeta beta betaln gammainc gammaincc kl_div fresnel "
    )
    two = {
        "rel_entr",
        "xlog1py",
        "xlogy",
        "zeta",
        "beta",
        "betaln",
        "gammainc",
        "gammaincc",
        "kl_div",
    }
    for name in one.split():
        if name == "bernoulli" or not hasattr(special, name):
            continue
        yield f"special.{name}", getattr(special, name), (p, p + 1) if name in two else (p,)
    yield "special.betainc", special.betainc, (p, p, p)
    yield "special.polygamma", lambda a: special.polygamma(1, a), (p,)
    yield "special.multigammaln", lambda a: special.multigammaln(a + 3, 2), (p,)
    yield "special.hyp1f1", special.hyp1f1, (p, p, p)


def _linalg() -> Iterator[Traced]:
    batch = jnp.stack([s, s + jnp.eye(4)])
    for name in """
        cholesky det inv pinv qr slogdet svd svdvals eigh eigvalsh norm matrix_rank
    """.split():
        yield f"linalg.{name}", getattr(jnp.linalg, name), (batch,)
    yield "linalg.solve", jnp.linalg.solve, (batch, batch)
    yield "linalg.lstsq", jnp.linalg.lstsq, (s, s)
    yield "linalg.matrix_power", lambda a: jnp.linalg.matrix_power(a, 3), (batch,)
    yield "linalg.eig", jnp.linalg.eig, (batch,)
    yield "linalg.cond", jnp.linalg.cond, (batch,)
    yield "linalg.multi_dot", lambda a: jnp.linalg.multi_dot([a, a]), (s,)
    yield "linalg.triangular_solve", lambda a: jax.scipy.linalg.solve_triangular(a, a), (s,)
    yield "linalg.lu", jax.scipy.linalg.lu, (s,)
    yield "linalg.expm", jax.scipy.linalg.expm, (s,)
    yield "linalg.cho_solve", lambda a: jax.scipy.linalg.cho_solve((a, True), a), (s,)
    yield "linalg.schur", jax.vmap(jax.scipy.linalg.schur), (batch,)
    yield "linalg.hessenberg", lax.linalg.hessenberg, (batch,)
    yield "linalg.tridiagonal_solve", lax.linalg.tridiagonal_solve, (x, x, x, x[..., None])
    yield "linalg.householder_product", lax.linalg.householder_product, (batch, batch[:, 0])
    yield "linalg.tridiagonal", lax.linalg.tridiagonal, (batch,)
    for name in """
        fft ifft rfft irfft fft2 ifft2 rfft2 fftn hfft ihfft fftshift ifftshift
    """.split():
        yield f"fft.{name}", getattr(jnp.fft, name), (x,)
    for method in ("nearest", "linear", "cubic", "lanczos3"):
        yield (
            f"image.resize {method}",
            lambda a, m=method: jax.image.resize(a, (2, 16, 12, 3), m),
            (image,),
        )
    yield (
        "image.scale_and_translate",
        lambda a: jax.image.scale_and_translate(
            a, (2, 4, 4, 3), (1, 2), jnp.ones(2), jnp.zeros(2), "linear"
        ),
        (image,),
    )
    yield "map_coordinates", lambda a: jax.scipy.ndimage.map_coordinates(a, [v, v], order=1), (x,)
    yield "signal.convolve2d", lambda a: jax.scipy.signal.convolve2d(a, a), (x,)


def _flax() -> Iterator[Traced]:
    rngs = nnx.Rngs(0)
    layers: dict[str, tuple[Any, Any]] = {
        "Linear": (nnx.Linear(6, 5, rngs=rngs), x),
        "LinearGeneral": (nnx.LinearGeneral(6, (2, 3), rngs=rngs), x),
        "Einsum": (nnx.Einsum("ij,jk->ik", (6, 5), rngs=rngs), x),
        "Embed": (nnx.Embed(4, 5, rngs=rngs), i),
        "Conv": (nnx.Conv(3, 4, (3, 3), rngs=rngs), image),
        "Conv strided": (nnx.Conv(3, 4, (3, 3), strides=2, padding="VALID", rngs=rngs), image),
        "Conv grouped": (nnx.Conv(3, 6, (3, 3), feature_group_count=3, rngs=rngs), image),
        "ConvTranspose": (nnx.ConvTranspose(3, 4, (3, 3), strides=2, rngs=rngs), image),
        "LayerNorm": (nnx.LayerNorm(6, rngs=rngs), x),
        "RMSNorm": (nnx.RMSNorm(6, rngs=rngs), x),
        "BatchNorm": (nnx.BatchNorm(6, rngs=rngs), x),
        "GroupNorm": (nnx.GroupNorm(6, num_groups=2, rngs=rngs), x),
        "InstanceNorm": (nnx.InstanceNorm(3, rngs=rngs), image),
        "Dropout": (nnx.Dropout(0.5, rngs=rngs), x),
        "LoRA": (nnx.LoRA(6, 2, 5, rngs=rngs), x),
        "MultiHeadAttention": (nnx.MultiHeadAttention(2, 6, decode=False, rngs=rngs), x[None]),
        "max_pool": (None, lambda a: nnx.max_pool(a, (2, 2), (2, 2))),
        "avg_pool": (None, lambda a: nnx.avg_pool(a, (3, 3), (1, 1), "SAME")),
        "min_pool": (None, lambda a: nnx.min_pool(a, (2, 2), (2, 2))),
        "LSTM": (nnx.RNN(nnx.LSTMCell(6, 6, rngs=rngs)), x[None]),
        "GRU": (nnx.RNN(nnx.GRUCell(6, 6, rngs=rngs)), x[None]),
    }
    for name, (layer, arg) in layers.items():
        if layer is None:
            yield f"nnx.{name}", arg, (image,)
            continue
        graph, float_state, rest = nnx.split(layer, nnx.Param, ...)

        def apply(params: Any, rest: Any, arg: Any, graph: Any = graph) -> Any:
            return nnx.merge(graph, params, rest)(arg)

        yield f"nnx.{name}", apply, (float_state, rest, arg)


def _optax() -> Iterator[Traced]:
    params = {"w": x, "b": v}
    optimizers: dict[str, optax.GradientTransformation] = {
        name: getattr(optax, name)(1e-3)
        for name in """
            adabelief adadelta adafactor adagrad adam adamw adamax adan amsgrad fromage lamb
            lars lion nadam noisy_sgd novograd radam rmsprop rprop sgd sign_sgd sm3 yogi
        """.split()
        if hasattr(optax, name) and name != "noisy_sgd"
    }
    optimizers["clip_by_global_norm"] = optax.clip_by_global_norm(1.0)
    optimizers["add_noise"] = optax.add_noise(0.1, 0.5, 0)
    optimizers["schedule"] = optax.sgd(optax.warmup_cosine_decay_schedule(0.0, 1.0, 2, 10))
    optimizers["adaptive_grad_clip"] = optax.adaptive_grad_clip(1.0)
    optimizers["apply_if_finite"] = optax.apply_if_finite(optax.sgd(0.1), 2)
    optimizers["multi_steps"] = optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
    optimizers["ema"] = optax.ema(0.9)
    optimizers["muon"] = optax.contrib.muon(1e-3)
    for name, optimizer in optimizers.items():
        state = optimizer.init(params)
        yield (
            f"optax.{name}",
            lambda g, s, q, o=optimizer: o.update(g, s, q),
            (params, state, params),
        )
    yield "optax.softmax_cross_entropy", optax.softmax_cross_entropy, (x, p)
    labels = i[:, 0]
    yield (
        "optax.integer_labels",
        lambda a: optax.softmax_cross_entropy_with_integer_labels(a, labels),
        (x,),
    )
    yield (
        "optax.ctc_loss",
        lambda a: optax.ctc_loss(a[None], jnp.zeros((1, 4)), i[:1, :3], jnp.zeros((1, 3))),
        (x,),
    )
    for name in """
        l2_loss huber_loss log_cosh cosine_similarity sigmoid_binary_cross_entropy hinge_loss
        kl_divergence
    """.split():
        yield f"optax.{name}", getattr(optax, name), (x, p)


def library() -> Iterator[Traced]:
    """Name, function and arguments of everything that is traced."""
    for table in (_numpy, _nn, _random, _special, _linalg, _flax, _optax):
        yield from table()


def _is_float(leaf: Any) -> bool:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return not is_key and jnp.issubdtype(leaf.dtype, jnp.inexact)


def gradient(fn: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The gradient of the squares of a function's results; `None` without float arguments."""
    leaves, tree = jax.tree.flatten(args)
    floats = [n for n, leaf in enumerate(leaves) if _is_float(leaf) and jnp.isrealobj(leaf)]
    if not floats:
        return None

    def loss(values: list[Any], *others: Any) -> Any:
        full = list(others)
        for n, value in zip(floats, values, strict=True):
            full[n] = value
        out = jax.tree.leaves(fn(*jax.tree.unflatten(tree, full)))
        parts = [
            jnp.sum(jnp.abs(o) if jnp.iscomplexobj(o) else jnp.square(o))
            for o in out
            if _is_float(o)
        ]
        return sum(parts, jnp.float32(0))

    return lambda: jax.grad(loss)([leaves[n] for n in floats], *leaves)
