"""The forward pass as one native call per step (kernels/native/forward.h), for models whose parts are all in C.

The same kernels in the same order as `CausalModel.forward_by_layers`, so the same bits; a step holds the interpreter
for some twenty microseconds instead of the whole pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.cache import PagedCache
from kernels.model_config import ModelConfig
from kernels.native_backend import DTYPE_CODES, NativeBackend
from kernels.native_linear import NativeLinear
from kernels.rope import RopeTable
from kernels.step import StepLayout


@dataclass(frozen=True, slots=True)
class NativeLayer:
    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    qk_norms: tuple[torch.Tensor, torch.Tensor] | None
    qkv: NativeLinear
    output: NativeLinear
    gate_up: NativeLinear
    down: NativeLinear


class NativeModel:
    """Keeps alive what the C side has addresses of. One step at a time."""

    def __init__(
        self,
        config: ModelConfig,
        backend: NativeBackend,
        rope: RopeTable,
        embedding: torch.Tensor,
        layers: Sequence[NativeLayer],
        final_norm: torch.Tensor,
    ) -> None:
        self._held = (rope, embedding, tuple(layers), final_norm)
        self._native, self._threads = backend.native, backend.threads
        self._embedding = embedding
        self._kv_shape = (config.num_kv_heads, config.head_dim, config.num_layers)
        inner = layers[0].down.in_features
        for tensor in (rope.cos, rope.sin, embedding, final_norm):
            assert tensor.is_contiguous()
        self._model = self._native.make_model(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            inner,
            DTYPE_CODES[embedding.dtype],
            config.rms_norm_eps,
            embedding.data_ptr(),
            rope.cos.data_ptr(),
            rope.sin.data_ptr(),
            final_norm.data_ptr(),
            tuple(_addresses(layer, config, inner) for layer in layers),
        )

    def forward(self, token_ids: torch.Tensor, step: StepLayout, cache: PagedCache) -> torch.Tensor:
        """token_ids `[tokens]` int64 to normed hidden states `[tokens, hidden]`; writes this step's KV."""
        layout, vocab_size = cache.layout, len(self._embedding)
        assert (layout.num_kv_heads, layout.head_dim, layout.num_layers) == self._kv_shape
        assert layout.dtype == self._embedding.dtype and cache.device.type == "cpu"
        assert (
            token_ids.dtype == torch.int64 and token_ids.is_contiguous() and len(token_ids) == step.num_tokens
        )
        least, most = (int(bound) for bound in torch.aminmax(token_ids))
        if not 0 <= least <= most < vocab_size:
            raise IndexError(f"token ids {least} to {most}: the vocabulary has {vocab_size}")
        hidden = self._embedding.new_empty((step.num_tokens, self._embedding.shape[1]))
        self._native.forward(
            self._model,
            token_ids.data_ptr(),
            hidden.data_ptr(),
            cache.tensor.data_ptr(),
            layout.block_bytes,
            step.tables.ctypes.data,
            step.tables.shape[1],
            step.slots.ctypes.data,
            step.starts.ctypes.data,
            step.counts.ctypes.data,
            step.firsts.ctypes.data,
            step.num_tokens,
            len(step.counts),
            layout.block_size,
            self._threads,
        )
        return hidden


def _addresses(layer: NativeLayer, config: ModelConfig, inner: int) -> tuple[object, ...]:
    """What `make_model` wants of a layer. Shapes are checked here, since C sees addresses only."""
    hidden, attended = config.hidden_size, config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    shapes = {
        layer.qkv: (attended + 2 * kv_size, hidden),
        layer.output: (hidden, attended),
        layer.gate_up: (2 * inner, hidden),
        layer.down: (hidden, inner),
    }
    for linear, shape in shapes.items():
        assert (linear.out_features, linear.in_features) == shape and linear.dtype == linear.out_dtype
    q_norm, k_norm = layer.qk_norms or (None, None)
    norms = (layer.attention_norm, layer.mlp_norm, q_norm, k_norm)
    for norm, size in zip(norms, (hidden, hidden, config.head_dim, config.head_dim), strict=True):
        assert norm is None or (norm.shape == (size,) and norm.dtype == torch.float32)
    return (
        *(0 if norm is None else norm.data_ptr() for norm in norms),
        *(linear.record for linear in shapes),
    )
