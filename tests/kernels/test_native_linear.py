"""Linear layers in C: every kind that this processor has, against float64 and against itself."""

import pytest
import torch

from kernels.linear import cancelling_pair
from kernels.native_backend import load_native
from kernels.native_linear import KINDS, NativeLinear, NativeProducts, PackedMemory, kinds_of
from kernels.products import choose_products

NATIVE = load_native()
if NATIVE is None:
    pytest.skip("the extension was not built here", allow_module_level=True)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CASES = [(dtype, kind) for dtype in DTYPES for kind in kinds_of(NATIVE, dtype)]
# Outputs and inputs: single ones, odd ones, one more and one less than a group, a tile, a work item.
SHAPES = [(1, 1), (5, 7), (16, 32), (17, 31), (33, 64), (63, 33), (64, 2), (65, 96), (100, 36), (211, 72)]
ERROR = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-23}


@pytest.fixture(
    params=CASES, ids=lambda case: f"{str(case[0]).removeprefix('torch.')}-{case[1]}{KINDS[case[1]]}"
)
def case(request: pytest.FixtureRequest) -> tuple[torch.dtype, int]:
    found: tuple[torch.dtype, int] = request.param
    return found


def _made(
    weight: torch.Tensor, bias: torch.Tensor | None, kind: int, threads: int = 1, wide: bool = False
) -> NativeLinear:
    assert NATIVE is not None
    out_dtype = torch.float32 if wide else weight.dtype
    return NativeProducts(NATIVE, threads, kind).linear(weight, bias, out_dtype)


def _into_poison(linear: NativeLinear, x: torch.Tensor, threads: int = 1) -> torch.Tensor:
    """The product, in a buffer that held NaN, between guards that must stay."""
    assert NATIVE is not None
    rows, guard = len(x), 64
    whole = torch.full((rows * linear.out_features + 2 * guard,), torch.nan, dtype=linear.out_dtype)
    y = whole[guard : len(whole) - guard]
    code = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}[linear.out_dtype]
    NATIVE.linear_rows(*linear.record, x.data_ptr(), rows, y.data_ptr(), code, threads)
    assert whole[:guard].isnan().all() and whole[len(whole) - guard :].isnan().all()
    return y.view(rows, linear.out_features)


@pytest.mark.parametrize("wide", [False, True])
def test_results_are_the_products_plus_bias(case: tuple[torch.dtype, int], wide: bool) -> None:
    """Fresh numbers each time; within the rounding of the result and of sums in fp32."""
    dtype, kind = case
    for out_features, in_features in SHAPES:
        for rows in (1, 2, 7, 16, 19, 37):
            weight = torch.randn(out_features, in_features).to(dtype)
            bias = torch.randn(out_features).to(dtype) if rows % 2 else None
            x = torch.randn(rows, in_features).to(dtype)
            found = _into_poison(_made(weight, bias, kind, wide=wide), x).double()
            exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
            sizes = x.double().abs() @ weight.double().abs().T + 1
            allowed = sizes * in_features**0.5 * 2**-22
            if not wide:
                allowed = allowed + exact.abs() * ERROR[dtype]
            assert ((found - exact).abs() <= allowed).all(), (out_features, in_features, rows)


@pytest.mark.parametrize(("out_features", "in_features"), [(70, 576), (200, 50), (48, 33)])
def test_a_row_has_the_same_bits_in_every_call(
    case: tuple[torch.dtype, int], out_features: int, in_features: int
) -> None:
    """Inputs whose exact products are zero: the result is the rounding, and any other order of sums shows."""
    dtype, kind = case
    generator = torch.Generator().manual_seed(5)
    weight, x = cancelling_pair(out_features, in_features, 256, dtype, generator)
    linear = _made(weight, None, kind, wide=True)
    alone = torch.cat([linear(row) for row in x.split(1)])
    assert alone.ne(0).any()
    for rows in (*range(1, 71), 256):
        first = 256 - rows if rows % 2 else 0
        for threads in (1, 2, 7) if rows in (1, 2, 16, 17, 33, 47, 256) else (1,):
            y = _into_poison(linear, x[first : first + rows], threads)
            assert torch.equal(y, alone[first : first + rows]), (rows, threads)


def test_two_threads_share_a_large_product(case: tuple[torch.dtype, int]) -> None:
    """Large enough that the second thread is woken at all."""
    dtype, kind = case
    if kind == 0:
        return  # slow, and shared out by the same code
    weight, x = torch.randn(1000, 700).to(dtype), torch.randn(40, 700).to(dtype)
    linear = _made(weight, None, kind)
    assert torch.equal(_into_poison(linear, x, 2), _into_poison(linear, x, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_widths_of_fused_products_give_equal_bits(dtype: torch.dtype) -> None:
    assert NATIVE is not None
    fused = [kind for kind in kinds_of(NATIVE, dtype) if KINDS[kind] == "fma"]
    weight, bias, x = torch.randn(50, 61).to(dtype), torch.randn(50).to(dtype), torch.randn(23, 61).to(dtype)
    results = [_made(weight, bias, kind)(x) for kind in fused]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_in_its_row_and_shows(case: tuple[torch.dtype, int], bad: float) -> None:
    dtype, kind = case
    weight, x = torch.rand(40, 50).to(dtype) + 1, torch.randn(21, 50).to(dtype)
    for rows in (1, 21):
        linear = _made(weight, None, kind)
        clean = linear(x[:rows])
        spoilt = x[:rows].clone()
        spoilt[rows // 2, 3] = bad
        found = linear(spoilt)
        assert not found[rows // 2].isfinite().any()
        found[rows // 2] = clean[rows // 2]
        assert torch.equal(found, clean)


def test_halves_overflow_to_infinity_and_keep_small_numbers() -> None:
    assert NATIVE is not None
    for kind in kinds_of(NATIVE, torch.float16):
        linear = _made(torch.full((3, 64), 60000.0, dtype=torch.float16), None, kind)
        assert linear(torch.full((2, 64), 60000.0, dtype=torch.float16)).isposinf().all()
        linear = _made(torch.full((3, 1), 2**-24, dtype=torch.float16), None, kind)
        assert (linear(torch.ones(2, 1, dtype=torch.float16)) == 2**-24).all()


def test_packed_weights_share_chunks_and_start_on_cache_lines() -> None:
    memory = PackedMemory()
    parts = [memory.take(size) for size in (100, 1, 64, 5 << 20)]
    assert [part.data_ptr() % 64 for part in parts] == [0] * 4
    assert [len(part) for part in parts] == [100, 1, 64, 5 << 20]
    assert parts[1].data_ptr() - parts[0].data_ptr() == 128
    assert len(memory.take(100 << 20)) == 100 << 20


def test_the_best_kind_is_taken_and_named() -> None:
    assert NATIVE is not None
    products = choose_products(torch.device("cpu"), 1)
    for dtype in DTYPES:
        products.linear(torch.zeros(3, 4, dtype=dtype), None, dtype)
        best = KINDS[kinds_of(NATIVE, dtype)[-1]]
        assert products.describe()[str(dtype).removeprefix("torch.")] == f"native-{best}"
