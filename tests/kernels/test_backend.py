"""Which backend a worker gets, and that a slow one is not given in silence."""

import pytest
import torch

from kernels import backend
from kernels.backend import TorchBackend, choose_backend
from kernels.native_backend import NativeBackend, load_native

_CPU = torch.device("cpu")


@pytest.mark.skipif(load_native() is None, reason="the extension was not built")
@pytest.mark.parametrize(("head_dim", "block_size"), [(20, 16), (64, 8)])
def test_a_shape_that_c_cannot_take_is_named(
    head_dim: int, block_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(choose_backend(_CPU, 64, 16, 1, torch.float32), NativeBackend)
    assert not caplog.records
    assert isinstance(choose_backend(_CPU, head_dim, block_size, 1, torch.float32), TorchBackend)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert f"head_dim {head_dim} and block size {block_size} must both be multiples of 16" in record.message


def test_a_missing_extension_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "load_native", lambda: None)
    assert isinstance(choose_backend(_CPU, 64, 16, 1, torch.float32), TorchBackend)
    [record] = caplog.records
    assert record.levelname == "WARNING" and "the C extension was not built" in record.message


def test_a_gpu_whose_model_no_kernel_takes_is_told_why(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(choose_backend(torch.device("cuda"), 300, 16, 1, torch.float16), TorchBackend)
    assert "head_dim 300" in caplog.text


def test_triton_on_a_cpu_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        choose_backend(_CPU, 64, 16, 1, torch.float32, wanted="triton")
