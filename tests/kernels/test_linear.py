"""Row policies: the probe finds what holds, and what holds is exact."""

import pytest
import torch
import torch.nn.functional as F

from kernels import products
from kernels.linear import ProbedLinear, ProbedProducts, Product, RowPolicy, cancelling_pair, probe

_SHAPES = [(96, 64), (200, 48), (7, 5), (36, 100), (960, 576), (576, 1536)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("out_features", "in_features"), _SHAPES)
def test_a_row_has_the_same_bits_in_every_call(
    out_features: int, in_features: int, dtype: torch.dtype
) -> None:
    """Inputs whose exact products are zero: the result is the rounding, and any other order of sums shows."""
    generator = torch.Generator().manual_seed(5)
    weight, x = cancelling_pair(out_features, in_features, 400, dtype, generator)
    threads = torch.get_num_threads()
    linear = ProbedLinear(weight, None, dtype, ProbedProducts(torch.device("cpu"), 2))
    torch.set_num_threads(1)
    alone = torch.cat([linear(x[row : row + 1]) for row in range(40)])
    try:
        for threads_now in (1, 2):
            torch.set_num_threads(threads_now)
            for count in (2, 3, 16, 33, 40, 63, 64, 65, 130, 257, 400):
                rows = min(count, 40)
                assert torch.equal(linear(x[:count])[:rows], alone[:rows]), (count, threads_now)
            assert torch.equal(linear(x[23:300])[:17], alone[23:40])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_results_are_products_plus_bias(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(50, 30, generator=generator), torch.randn(50, generator=generator)
    x = torch.randn(70, 30, generator=generator)
    linear = ProbedLinear(weight.to(dtype), bias.to(dtype), dtype, ProbedProducts(torch.device("cpu"), 1))
    wanted = F.linear(x.to(dtype).double(), weight.to(dtype).double(), bias.to(dtype).double())
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
    found = linear(x.to(dtype))
    assert found.dtype == dtype and found.shape == (70, 50)
    torch.testing.assert_close(found.double(), wanted, atol=tolerance * 4, rtol=tolerance)


def _order_by_count(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """A product that sums backwards in calls of more than 20 rows: variant, and the probe must see it."""

    def product(x: torch.Tensor) -> torch.Tensor:
        order = torch.arange(x.shape[1] - 1, -1, -1) if x.shape[0] > 20 else torch.arange(x.shape[1])
        y = torch.zeros(x.shape[0], weight.shape[0])
        for i in order.tolist():
            y = y + x[:, i : i + 1] * weight[:, i]
        return y

    return product


def test_the_probe_rejects_what_depends_on_the_row_count() -> None:
    policy = probe(_order_by_count, 24, 32, torch.float32, threads=1)
    assert policy is not None and policy.granule > 20  # tiles on one side of the change only
    assert probe(_order_by_place, 24, 32, torch.float32, threads=1) is None


def _order_by_place(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """A product whose fourth row sums backwards: no policy can hold."""

    def product(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(x.shape[0], weight.shape[0])
        z = torch.zeros(x.shape[0], weight.shape[0])
        for i in range(x.shape[1]):
            y = y + x[:, i : i + 1] * weight[:, i]
            z = z + x[:, -1 - i : x.shape[1] - i] * weight[:, -1 - i]
        y[3::8] = z[3::8]
        return y

    return product


def test_the_choice_is_remembered_and_named() -> None:
    choices = ProbedProducts(torch.device("cpu"), 1)
    first = choices.choose(48, 64, torch.float32)
    assert choices.choose(48, 64, torch.float32) is first
    assert list(choices.describe()) == ["48x64:float32"]


def test_without_the_extension_torch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "load_native", lambda: None)
    assert isinstance(products.choose_products(torch.device("cpu"), 1), ProbedProducts)


def test_padding() -> None:
    assert [RowPolicy(64, 64, 256).padded_rows(n) for n in (1, 64, 65)] == [64, 64, 128]
    assert [RowPolicy(1, 2, 512).padded_rows(n) for n in (1, 2, 3)] == [2, 2, 3]
