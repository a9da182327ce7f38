"""Real modules, and what plain PyTorch does with them in each precision. Prints the table of all verdicts.

PYTHONPATH=.:tests python tests/support/module_table.py
"""

import functools
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModel

from hpo.config.sections import CompatConfig
from hpo.precision.amp import MixedPrecision
from hpo.precision.table import PRECISIONS as TABLE
from hpo.precision.table import AmpConfig
from hpo.trial.check_precision import device_of, work_of_loss
from hpo.trial.compat import Compatibility, judge
from hpo.trial.measure import measure_work

PRECISIONS = ("fp32", "bf16", "fp16", "bf16-true")
Case = tuple[Callable[[], nn.Module], Callable[[], Any]]
"""Makes the module, and its input: a tensor, or a tuple or dict of arguments."""


def vectors() -> Tensor:
    return torch.randn(8, 16)


def sequences() -> Tensor:
    return torch.randn(8, 5, 16)


def images() -> Tensor:
    return torch.randn(4, 8, 8, 8)


def volumes() -> Tensor:
    return torch.randn(2, 4, 6, 6, 6)


def ids() -> Tensor:
    return torch.randint(5, 40, (4, 6))


class Calls(nn.Module):
    """Modules and a function that calls them."""

    def __init__(self, function: Callable[..., Any], *modules: nn.Module, **buffers: Tensor) -> None:
        super().__init__()
        self.function = function
        self.inner = nn.ModuleList(modules)
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def residual_block() -> nn.Module:
    conv, norm = (
        functools.partial(nn.Conv2d, 8, 8, 3, padding=1, bias=False),
        functools.partial(nn.BatchNorm2d, 8),
    )
    return Calls(
        lambda self, x: F.relu(x + self.inner[3](self.inner[2](F.relu(self.inner[1](self.inner[0](x)))))),
        *(conv(), norm(), conv(), norm()),
    )


def squeeze_and_excitation() -> nn.Module:
    return Calls(
        lambda self, x: x * self.inner[1](F.relu(self.inner[0](x.mean((2, 3), keepdim=True)))).sigmoid(),
        *(nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)),
    )


def inverted_residual() -> nn.Module:
    depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
    return nn.Sequential(
        nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16), nn.ReLU6(), depthwise, nn.Hardswish(), nn.Conv2d(16, 8, 1)
    )


def rotated(x: Tensor, angles: Tensor, *, casts: bool) -> Tensor:
    cos, sin = angles.cos(), angles.sin()
    one, other = x.chunk(2, dim=-1)
    turned = torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)
    return turned.to(x.dtype) if casts else turned


def rotary_attention(*, casts: bool) -> nn.Module:
    def attend(self: Any, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[1]).to(self.inv_freq.dtype), self.inv_freq)
        q, k, v = self.inner[0](x).chunk(3, dim=-1)
        q, k = rotated(q, angles, casts=casts), rotated(k, angles, casts=casts)
        return F.scaled_dot_product_attention(q, k, v)

    return Calls(attend, nn.Linear(16, 48), inv_freq=100.0 ** -torch.linspace(0, 1, 8))


def self_attention(**options: Any) -> nn.Module:
    attention = nn.MultiheadAttention(16, 2, batch_first=True, **options)
    return Calls(lambda self, x: self.inner[0](x, x, x)[0], attention)


def causal_attention() -> nn.Module:
    def attend(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.inner[0](x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return self.inner[1](
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )

    return Calls(attend, nn.Linear(16, 48), nn.Linear(16, 16))


def masked_attention() -> nn.Module:
    def attend(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.inner[0](x).chunk(3, dim=-1)
        scores = (q @ k.transpose(1, 2) / 4 + self.mask).softmax(dim=-1)
        return self.inner[1](scores @ v)

    mask = torch.full((5, 5), -math.inf).triu(1)
    return Calls(attend, nn.Linear(16, 48), nn.Linear(16, 16), mask=mask)


def linear_attention() -> nn.Module:
    def attend(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.inner[0](x).chunk(3, dim=-1)
        return (F.elu(q) + 1) @ ((F.elu(k) + 1).transpose(1, 2) @ v) / 16

    return Calls(attend, nn.Linear(16, 48))


def positions() -> nn.Module:
    return Calls(lambda self, x: self.inner[0](x + self.table), nn.Linear(16, 4), table=torch.randn(1, 5, 16))


def recomputed() -> nn.Module:
    return Calls(lambda self, x: checkpoint(self.inner[0], x, use_reentrant=False), feed_forward())


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


def auxiliary_output() -> nn.Module:
    """Another output in training than in evaluation, as Inception has."""
    return Calls(
        lambda self, x: (self.inner[0](x), self.inner[1](x)) if self.training else self.inner[0](x),
        *(nn.Linear(16, 4), nn.Linear(16, 4)),
    )


def running_norm() -> nn.Module:
    """A user's own norm with running statistics, fresh: it divides in training alone."""

    def norm(self: Any, x: Tensor) -> Tensor:
        hidden = self.inner[0](x * 3e4)
        return self.inner[1]((hidden - hidden.mean(0)) / hidden.std(0) if self.training else hidden)

    return Calls(norm, nn.Linear(16, 16), nn.Linear(16, 4))


def noisy() -> nn.Module:
    """Noise in the format of the states, as in a variational autoencoder."""
    return Calls(
        lambda self, x: self.inner[1](self.inner[0](x) + 3 * torch.randn_like(self.inner[0](x))),
        *(nn.Linear(16, 16), nn.Linear(16, 4)),
    )


def old_norm(apply: Callable[..., nn.Module]) -> nn.Module:
    with warnings.catch_warnings(action="ignore"):
        return nn.Sequential(apply(nn.Linear(16, 16)), nn.Linear(16, 4))


def parametrized(apply: Callable[..., nn.Module]) -> Case:
    return lambda: nn.Sequential(apply(nn.Linear(16, 16)), nn.Linear(16, 4)), vectors


def transformer(model_type: str, **options: Any) -> Case:
    sizes = {
        "vocab_size": 48,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 32,
    }

    def make() -> nn.Module:
        known = AutoConfig.for_model(model_type)
        keys = {*known.to_dict(), *known.attribute_map}
        chosen = {name: value for name, value in sizes.items() if name in keys} | options
        without = {name: 0.0 for name in known.to_dict() if "drop" in name and name not in chosen}
        without = {
            name: rate for name, rate in without.items() if isinstance(getattr(known, name, None), float)
        }
        return AutoModel.from_config(
            AutoConfig.for_model(model_type, **chosen | without), dtype=torch.float32
        )

    return make, lambda: {"input_ids": ids()}


MODULES: dict[str, Case] = {
    "Linear": (lambda: nn.Linear(16, 4), vectors),
    "Bilinear": (lambda: Calls(lambda self, x: self.inner[0](x, x), nn.Bilinear(16, 16, 4)), vectors),
    "LazyLinear": (lambda: nn.LazyLinear(4), vectors),
    "Conv1d": (lambda: nn.Conv1d(5, 4, 3), sequences),
    "Conv2d": (lambda: nn.Conv2d(8, 4, 3), images),
    "Conv3d": (lambda: nn.Conv3d(4, 4, 3), volumes),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(5, 4, 3), sequences),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(8, 4, 3), images),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(4, 4, 3), volumes),
    "Embedding": (lambda: nn.Embedding(48, 16), ids),
    "Embedding, sparse": (lambda: nn.Embedding(48, 16, sparse=True), ids),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(48, 16), ids),
    "LayerNorm": (lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4)), vectors),
    "RMSNorm": (lambda: nn.Sequential(nn.RMSNorm(16), nn.Linear(16, 4)), vectors),
    "GroupNorm": (lambda: nn.Sequential(nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 3)), images),
    "BatchNorm1d": (lambda: nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)), vectors),
    "BatchNorm2d": (lambda: nn.Sequential(nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4)), images),
    "BatchNorm3d": (lambda: nn.Sequential(nn.Conv3d(4, 4, 3), nn.BatchNorm3d(4)), volumes),
    "BatchNorm1d first": (lambda: nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 4)), vectors),
    "InstanceNorm2d": (lambda: nn.Sequential(nn.Conv2d(8, 4, 3), nn.InstanceNorm2d(4, affine=True)), images),
    "InstanceNorm2d, running": (
        lambda: nn.Sequential(
            nn.InstanceNorm2d(8, affine=True, track_running_stats=True), nn.Conv2d(8, 4, 3)
        ),
        images,
    ),
    "LocalResponseNorm": (lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.LocalResponseNorm(2)), images),
    "PReLU": (lambda: nn.Sequential(nn.Linear(16, 4), nn.PReLU()), vectors),
    "RReLU": (lambda: nn.Sequential(nn.Linear(16, 4), nn.RReLU()), vectors),
    "FractionalMaxPool2d": (
        lambda: nn.Sequential(nn.Conv2d(8, 4, 1), nn.FractionalMaxPool2d(2, output_size=3)),
        images,
    ),
    "RNN": (lambda: nn.RNN(16, 8, batch_first=True), sequences),
    "LSTM": (lambda: nn.LSTM(16, 8, 2, batch_first=True, bidirectional=True), sequences),
    "LSTM, projected": (lambda: nn.LSTM(16, 8, proj_size=4), sequences),
    "LSTM, packed": (
        lambda: Calls(
            lambda self, x: self.inner[0](x).data, Calls(lambda s, x: s.inner[0](x)[0], nn.LSTM(16, 8))
        ),
        lambda: pack_sequence([torch.randn(length, 16) for length in (5, 3, 2)]),
    ),
    "GRU": (lambda: nn.GRU(16, 8, batch_first=True), sequences),
    "RNNCell": (lambda: nn.RNNCell(16, 8), vectors),
    "LSTMCell": (lambda: nn.LSTMCell(16, 8), vectors),
    "GRUCell": (lambda: nn.GRUCell(16, 8), vectors),
    "AdaptiveLogSoftmaxWithLoss": (
        lambda: Calls(
            lambda self, x: self.inner[0](x, torch.arange(len(x))).output,
            nn.AdaptiveLogSoftmaxWithLoss(16, 12, [4, 8]),
        ),
        vectors,
    ),
    "MultiheadAttention": (self_attention, sequences),
    "MultiheadAttention, biased": (lambda: self_attention(add_bias_kv=True, add_zero_attn=True), sequences),
    "MultiheadAttention, kdim": (
        lambda: Calls(
            lambda self, x: self.inner[0](x, x[..., :8], x[..., :4])[0],
            nn.MultiheadAttention(16, 2, batch_first=True, kdim=8, vdim=4),
        ),
        sequences,
    ),
    "TransformerEncoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2),
        sequences,
    ),
    "TransformerDecoder": (
        lambda: Calls(
            lambda self, x: self.inner[0](x, x),
            nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, 0.0, batch_first=True), 1),
        ),
        sequences,
    ),
    "Transformer": (
        lambda: Calls(
            lambda self, x: self.inner[0](x, x), nn.Transformer(16, 2, 1, 1, 32, 0.0, batch_first=True)
        ),
        sequences,
    ),
    "attention, causal": (causal_attention, sequences),
    "attention, -inf in a mask": (masked_attention, sequences),
    "attention, linear": (linear_attention, sequences),
    "attention, rotary": (lambda: rotary_attention(casts=True), sequences),
    "attention, rotary without a cast": (lambda: rotary_attention(casts=False), sequences),
    "table of positions": (positions, sequences),
    "spectral_norm": parametrized(parametrizations.spectral_norm),
    "weight_norm": parametrized(parametrizations.weight_norm),
    "orthogonal": parametrized(parametrizations.orthogonal),
    "orthogonal, Cayley": parametrized(
        functools.partial(parametrizations.orthogonal, orthogonal_map="cayley")
    ),
    "weight_norm, old": (lambda: old_norm(nn.utils.weight_norm), vectors),
    "spectral_norm, old": (lambda: old_norm(nn.utils.spectral_norm), vectors),
    "pruned": parametrized(lambda linear: prune.l1_unstructured(linear, "weight", 0.5)),
    "residual block": (residual_block, images),
    "squeeze and excitation": (squeeze_and_excitation, images),
    "inverted residual": (inverted_residual, images),
    "feed-forward": (feed_forward, vectors),
    "recomputation": (recomputed, vectors),
    "auxiliary output": (auxiliary_output, vectors),
    "own running norm": (running_norm, vectors),
    "noise": (noisy, vectors),
    "dropout of a fixed rate": (
        lambda: Calls(lambda self, x: F.dropout(self.inner[0](x), 0.5, self.training), nn.Linear(16, 4)),
        vectors,
    ),
    "script": (lambda: scripted(feed_forward()), vectors),
    "complex weights": (
        lambda: Calls(
            lambda self, x: torch.fft.irfft(torch.fft.rfft(self.inner[0](x).float()) * self.inner[1].weight),
            *(nn.Linear(16, 16), nn.Embedding(1, 9, dtype=torch.complex64)),
        ),
        vectors,
    ),
    "sparse matrix": (
        lambda: Calls(
            lambda self, x: torch.sparse.mm(self.graph, self.inner[0](x)),
            nn.Linear(16, 4),
            graph=torch.eye(8).to_sparse_csr(),
        ),
        vectors,
    ),
    "overflows in fp16": (
        lambda: Calls(lambda self, x: self.inner[0](x * 1e5) * 1e-5, nn.Linear(16, 4)),
        vectors,
    ),
    "Bessel function": (
        lambda: Calls(lambda s, x: s.inner[0](x) * torch.special.bessel_j0(x), nn.Linear(16, 16)),
        vectors,
    ),
    "bert": transformer("bert"),
    "modernbert": transformer("modernbert", pad_token_id=0),
    "gpt2": transformer("gpt2", n_embd=16, n_layer=2, n_head=2, vocab_size=48),
    "llama": transformer("llama"),
    "mamba": transformer("mamba", state_size=4),
}

FAMILIES: dict[str, Case] = {
    name: transformer(name, **options)
    for name, options in {
        "albert": {"embedding_size": 8},
        "bloom": {"n_layer": 2, "n_head": 2, "hidden_size": 16},
        "camembert": {},
        "clip_text_model": {},
        "convbert": {"embedding_size": 16},
        "deberta": {},
        "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
        "electra": {"embedding_size": 8},
        "esm": {"position_embedding_type": "rotary", "mask_token_id": 3, "pad_token_id": 1},
        "falcon": {},
        "fnet": {},
        "gemma": {"head_dim": 8, "num_key_value_heads": 1},
        "gemma2": {"head_dim": 8, "num_key_value_heads": 1},
        "gemma3_text": {"head_dim": 8, "num_key_value_heads": 1},
        "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 2},
        "gpt_neox": {},
        "ibert": {},
        "mistral": {"num_key_value_heads": 1},
        "mixtral": {"num_key_value_heads": 1, "num_local_experts": 2},
        "mpnet": {},
        "opt": {"ffn_dim": 32, "word_embed_proj_dim": 16},
        "olmo2": {},
        "phi": {},
        "qwen2": {"num_key_value_heads": 1},
        "qwen3": {"num_key_value_heads": 1, "head_dim": 8},
        "roberta": {},
        "roformer": {"embedding_size": 16},
        "rwkv": {"attention_hidden_size": 16},
        "squeezebert": {"q_groups": 1, "k_groups": 1, "v_groups": 1, "post_attention_groups": 1,
                        "intermediate_groups": 1, "output_groups": 1, "embedding_size": 16},
        "stablelm": {"num_key_value_heads": 2},
        "xlnet": {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32},
    }.items()
}  # fmt: skip


def scripted(module: nn.Module) -> Any:
    with warnings.catch_warnings(action="ignore"):
        return torch.jit.script(module)


def loss_of_batch(model: nn.Module, batch: Any) -> Tensor:
    """Return a loss of all outputs with a number."""
    mapping = isinstance(batch, dict)
    output = model(**batch) if mapping else model(batch)
    floats = [one for one in tree_leaves(output) if isinstance(one, Tensor) and one.is_floating_point()]
    weighted = (one.float() * torch.linspace(1, 2, one.shape[-1]) for one in floats)
    return torch.stack([one.square().mean() for one in weighted]).sum()


def made(case: Case) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    make_model, make_batch = case
    return make_model().train(), make_batch()


def plain_pass(case: Case, precision: str) -> tuple[Tensor, Tensor]:
    """Return loss and gradients, as one vector, of plain PyTorch."""
    model, batch = made(case)
    if precision == "bf16-true":
        loss_of_batch(model, batch)  # makes lazy modules
        model.bfloat16()
        model.zero_grad()
        batch = tree_map(lambda one: one.bfloat16() if one.is_floating_point() else one, [batch])[0]
        if hasattr(batch, "batch_sizes"):
            batch = batch.to(torch.bfloat16)
    autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    scale = 2.0**16 if precision == "fp16" else 1.0
    while True:
        torch.manual_seed(1)
        model.zero_grad()
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            loss = loss_of_batch(model, batch)
        (loss * scale).backward()
        gradients = [
            torch.view_as_real(g) if g.is_complex() else g for g in map(_gradient, model.parameters())
        ]
        joined = torch.cat([one.to_dense().float().flatten() / scale for one in gradients])
        if joined.isfinite().all() or scale <= 1:
            return loss.detach().float(), joined
        scale /= 2


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def plain(case: Case, precision: str) -> str:
    """Return what plain PyTorch does: `works`, or why not."""
    try:
        loss, gradients = plain_pass(case, precision)
    except Exception as error:
        return f"raises {type(error).__name__}"
    if not loss.isfinite() or not gradients.isfinite().all():
        return "not finite"
    reference, expected = plain_pass(case, "fp32")
    cosine = float(F.cosine_similarity(gradients, expected, dim=0))
    differs = cosine < 0.5 or abs(loss - reference) > 0.5 * abs(reference)
    return "differs" if differs and precision != "fp32" else "works"


def checked(case: Case, precision: str) -> Compatibility:
    """Return the verdict of `hpo.check_precision`, without its costs."""
    model, batch = made(case)
    amp = MixedPrecision(TABLE[precision], AmpConfig(), device_of(model))
    work = work_of_loss(model, loss_of_batch, batch)
    return judge(measure_work(model, amp, work), CompatConfig())


def rows() -> Iterator[str]:
    """Yield the table in Markdown, and its counts."""
    warnings.simplefilter("ignore")
    yield "| module | " + " | ".join(PRECISIONS) + " |\n" + "| --- " * (len(PRECISIONS) + 1) + "|"
    counts = Counter[str]()
    for name, case in (MODULES | FAMILIES).items():
        cells = []
        for precision in PRECISIONS:
            check, expected = checked(case, precision), plain(case, precision)
            cells.append(f"{check.verdict}, agrees {check.measurement.agrees}; plain: {expected}")
            counts[f"{check.verdict} where plain PyTorch {expected.split()[0]}"] += 1
        yield f"| {name} | " + " | ".join(cells) + " |"
    yield f"{len(MODULES | FAMILIES)} modules in {len(PRECISIONS)} precisions: {dict(counts)}"


if __name__ == "__main__":
    for row in rows():
        sys.stdout.write(row + "\n")
        sys.stdout.flush()
