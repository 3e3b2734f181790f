"""The forward pass of the Llama family over a paged cache: Llama, SmolLM2, Mistral, Qwen2, Qwen3.

One ragged batch form for everything: rows with one or many query tokens over block tables (`StepLayout`). Every
operation is batch-invariant, so a token's hidden state depends on its own sequence alone.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.backend import Backend
from kernels.cache import PagedCache
from kernels.model_config import ModelConfig
from kernels.native_backend import NativeBackend
from kernels.native_linear import NativeLinear
from kernels.native_model import NativeLayer, NativeModel
from kernels.products import Linear, Products, choose_products
from kernels.rope import RopeTable, make_rope_table
from kernels.step import StepLayout
from kernels.weights import Progress, Tensors, each_layer


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: Linear
    qk_norms: tuple[torch.Tensor, torch.Tensor] | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class CausalModel:
    """Weights and arithmetic; holds no sequence. Built by `load_model`."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        backend: Backend,
        rope: RopeTable,
        embedding: torch.Tensor,
        layers: list[_Layer],
        final_norm: torch.Tensor,
        head: Linear,
        products: Products,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.backend = backend
        self.products = products
        self._rope = rope
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._native = _all_native(config, backend, rope, embedding, layers, final_norm)

    def forward(self, token_ids: torch.Tensor, step: StepLayout, cache: PagedCache) -> torch.Tensor:
        """token_ids `[tokens]` int64 to normed hidden states `[tokens, hidden]`; writes this step's KV."""
        if self._native is not None:
            return self._native.forward(token_ids, step, cache)
        return self.forward_by_layers(token_ids, step, cache)

    def forward_by_layers(self, token_ids: torch.Tensor, step: StepLayout, cache: PagedCache) -> torch.Tensor:
        """The same, operation by operation: where not all is native, and to compare with where it is."""
        ops, eps = self.backend, self.config.rms_norm_eps
        residual = F.embedding(token_ids, self._embedding)
        x = ops.rms_norm(residual, self._layers[0].attention_norm, eps)
        next_norms = [*(layer.attention_norm for layer in self._layers[1:]), self._final_norm]
        for index, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            q = ops.rope_and_store(layer.qkv(x), layer.qk_norms, eps, self._rope, step, cache, index)
            attended = layer.output(ops.attention(q, step, cache, index))
            x, residual = ops.add_rms_norm(attended, residual, layer.mlp_norm, eps)
            inner = ops.silu_mul(layer.gate_up(x))
            x, residual = ops.add_rms_norm(layer.down(inner), residual, next_norm, eps)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normed hidden states `[rows, hidden]` to fp32 logits `[rows, vocab]`.

        The head adds up in fp32 and does not round, whatever the model's dtype: a bf16 result has eight bits, and
        ties between the best tokens would be everyday.
        """
        return self._head(hidden)


def _all_native(
    config: ModelConfig,
    backend: Backend,
    rope: RopeTable,
    embedding: torch.Tensor,
    layers: list[_Layer],
    final_norm: torch.Tensor,
) -> NativeModel | None:
    if not isinstance(backend, NativeBackend):
        return None
    native = []
    for layer in layers:
        linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
        ours = [linear for linear in linears if isinstance(linear, NativeLinear)]
        if len(ours) != len(linears):
            return None
        native.append(NativeLayer(layer.attention_norm, layer.mlp_norm, layer.qk_norms, *ours))
    return NativeModel(config, backend, rope, embedding, native, final_norm)


def load_model(
    checkpoint: Tensors,
    dtype: torch.dtype,
    device: torch.device,
    backend: Backend,
    max_model_len: int,
    threads: int,
    progress: Progress | None = None,
    spare_threads: int = 0,
) -> CausalModel:
    """Reads and prepares all weights. Projections that read the same input are joined into one product."""
    config = checkpoint.config
    products = choose_products(device, threads, spare_threads)

    def weight(name: str) -> torch.Tensor:
        return checkpoint.tensor(name).to(device, dtype)

    def linear(prefix: str, *names: str) -> Linear:
        parts = [weight(f"{prefix}{name}.weight") for name in names]
        bias_names = [f"{prefix}{name}.bias" for name in names]
        bias = None
        if checkpoint.has(bias_names[0]):
            bias = torch.cat([weight(name) for name in bias_names])
        return products.linear(torch.cat(parts) if len(parts) > 1 else parts[0], bias, dtype)

    def kept(name: str) -> torch.Tensor:
        # A copy: a tensor that needed no conversion would keep the checkpoint's file mapped.
        return weight(name).clone()

    def norm(name: str) -> torch.Tensor:
        return weight(name).to(torch.float32, copy=True)  # rounded to the model's dtype, held wide

    def norms(prefix: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        return (norm(prefix + "q_norm.weight"), norm(prefix + "k_norm.weight")) if config.qk_norm else None

    layers = []
    for index in each_layer(config, progress):
        prefix = f"model.layers.{index}."
        layers.append(
            _Layer(
                attention_norm=norm(prefix + "input_layernorm.weight"),
                qkv=linear(prefix + "self_attn.", "q_proj", "k_proj", "v_proj"),
                qk_norms=norms(prefix + "self_attn."),
                output=linear(prefix + "self_attn.", "o_proj"),
                mlp_norm=norm(prefix + "post_attention_layernorm.weight"),
                gate_up=linear(prefix + "mlp.", "gate_proj", "up_proj"),
                down=linear(prefix + "mlp.", "down_proj"),
            )
        )
    embedding = kept("model.embed_tokens.weight")
    head = embedding if config.tie_word_embeddings else weight("lm_head.weight")
    return CausalModel(
        config=config,
        dtype=dtype,
        device=device,
        backend=backend,
        rope=make_rope_table(config, max_model_len, device),
        embedding=embedding,
        layers=layers,
        final_norm=norm("model.norm.weight"),
        head=products.linear(head, None, torch.float32),
        products=products,
    )
