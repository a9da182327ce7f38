"""The multitask model: one encoder, and one head for each task.

    input_ids_BL -> encoder -> hidden_BLD -+-> pooling -> pooled_BD -> head -> logits_BK    sequence tasks
                                           +----------------------->  head -> logits_BLK   token tasks

The module knows nothing of precision, devices or compilation: freezing, compiling and exporting are functions
of it. Pooling sums over tokens in fp32 and returns the dtype of its input: a bf16 sum has 8 bits, so at 256
an addition of 0.5 is lost. `build_model` makes the model, and refuses settings that the encoder cannot do.

Shape suffixes: B windows, L tokens in a window, D hidden size, K outputs of one task, T tasks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from hpo.code import errors_of_code
from hpo.errors import CodeError, ModelError
from hpo.extensions import HEADS, POOLINGS, options_of
from hpo.memory import is_out_of_memory
from hpo.models.batch_independence import check_texts_are_independent
from hpo.models.dropout import use_bit_dropout
from hpo.models.encoder import encoder_layers, is_causal, max_positions, takes_type_ids
from hpo.precision.amp import has_bf16_weights
from hpo.tasks.kind import Task, kind_of


@dataclass(frozen=True)
class HeadSettings:
    """Settings of heads, by their names in the study file."""

    pooling: str = "mean"
    head_type: str = "linear"
    head_types: Mapping[str, str] = field(default_factory=dict)
    head_hidden_size: int = 256
    head_dropout: float = 0.1
    loss_weighting: str = "fixed"
    option: Mapping[str, Any] = field(default_factory=dict)

    def of(self, task: Task) -> str:
        """Return the type of a task's head."""
        return self.head_types.get(task.name, self.head_type)


class MultitaskModel(nn.Module):
    """An encoder and one head for each task.

    `encoder` takes input_ids and attention_mask and returns a `last_hidden_state` [B, L, D], with D its
    `config.hidden_size`.
    """

    def __init__(self, encoder: Any, tasks: Sequence[Task], heads: HeadSettings) -> None:
        super().__init__()
        self.tasks = tuple(tasks)
        self.head_settings = heads
        self.encoder = encoder
        self.passes_type_ids = takes_type_ids(encoder)
        # transformers' attention functions make masks; other encoders need one.
        self.makes_masks = getattr(encoder, "_supports_attention_backend", False)
        size = encoder.config.hidden_size
        self.pool = _pooling(heads, size)
        # Lists in the order of the tasks: a dictionary of modules refuses names such as `type` or `a.b`.
        self.heads = nn.ModuleList(_head(heads, size, task) for task in tasks)
        self._initialize(getattr(encoder.config, "initializer_range", 0.02))
        self.log_variances = nn.ParameterList(
            nn.Parameter(torch.zeros(())) for _ in tasks if heads.loss_weighting == "uncertainty"
        )

    def _initialize(self, std: float) -> None:
        """Initialise this package's pooling and heads, and give each head the bias of its task's kind."""
        types = [self.head_settings.of(task) for task in self.tasks]
        ours = [head for head, name in zip(self.heads, types, strict=True) if name not in HEADS]
        pools = [self.pool] if isinstance(self.pool, AttentionPooling) else []
        for module in (inner for one in (*pools, *ours) for inner in one.modules()):
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        with torch.no_grad():
            for task, head in zip(self.tasks, self.heads, strict=True):
                linear = [
                    one for one in head.modules() if isinstance(one, nn.Linear) and one.bias is not None
                ]
                if linear and linear[-1].out_features == task.num_outputs:
                    linear[-1].bias.copy_(torch.tensor(kind_of(task).initial_bias()))

    @property
    def log_variance(self) -> dict[str, nn.Parameter] | None:
        """Learnt log variance of each task (arXiv 1705.07115). None: losses have fixed weights."""
        if not len(self.log_variances):
            return None
        return dict(zip((task.name for task in self.tasks), self.log_variances, strict=True))

    def hidden_states(
        self, input_ids_BL: Tensor, attention_mask_BL: Tensor | None, type_ids_BL: Tensor | None = None
    ) -> Tensor:
        """Return the encoder's last hidden states, [B, L, D]; for the arguments see `forward`."""
        if attention_mask_BL is None and not self.makes_masks:
            attention_mask_BL = torch.ones_like(input_ids_BL)
        inputs = {"input_ids": input_ids_BL, "attention_mask": attention_mask_BL}
        if type_ids_BL is not None and self.passes_type_ids:
            inputs["token_type_ids"] = type_ids_BL
        hidden_BLD = cast(Tensor, self.encoder(**inputs).last_hidden_state)
        # Encoders with bf16 weights may return fp32, such as Mamba; its own heads cast too.
        return hidden_BLD.bfloat16() if has_bf16_weights(self.heads) else hidden_BLD

    def forward(
        self, input_ids_BL: Tensor, attention_mask_BL: Tensor | None, type_ids_BL: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return each task's logits: [B, K] of sequence tasks, [B, L, K] of token tasks.

        `attention_mask_BL` is 1 at real tokens and 0 at padding; None: there is no padding. `type_ids_BL` is
        ignored by encoders without segments.
        """
        hidden_BLD = self.hidden_states(input_ids_BL, attention_mask_BL, type_ids_BL)
        mask_BL = torch.ones_like(input_ids_BL) if attention_mask_BL is None else attention_mask_BL
        pooled_BD = None
        logits = {}
        for task, head in zip(self.tasks, self.heads, strict=True):
            if task.level == "sequence" and pooled_BD is None:
                pooled_BD = self.pool(hidden_BLD, mask_BL)
            logits[task.name] = head(hidden_BLD if task.level == "token" else pooled_BD)
        return logits


def pool_cls(hidden_BLD: Tensor, _mask_BL: Tensor) -> Tensor:
    """Return the first token's hidden state, [B, D]."""
    return hidden_BLD[:, 0]


def pool_mean(hidden_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """Return the mean over real tokens, [B, D]. Like sentence-transformers, it includes [CLS] and [SEP]."""
    dtype = torch.promote_types(hidden_BLD.dtype, torch.float32)
    mask_BL1 = mask_BL.unsqueeze(-1).to(dtype)
    sum_BD = (hidden_BLD.to(dtype) * mask_BL1).sum(dim=1)
    return (sum_BD / mask_BL1.sum(dim=1).clamp(min=1)).to(hidden_BLD.dtype)


def pool_max(hidden_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """Return the largest value of each dimension over real tokens, [B, D]."""
    lowest = torch.finfo(hidden_BLD.dtype).min
    return hidden_BLD.masked_fill(mask_BL.unsqueeze(-1) == 0, lowest).amax(dim=1)


def pool_last(hidden_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """Return the last real token's hidden state, [B, D]. Padding may be on either end."""
    position_BL = torch.arange(1, mask_BL.shape[1] + 1, device=mask_BL.device) * (mask_BL != 0)
    last_B11 = position_BL.argmax(dim=1)[:, None, None]
    return hidden_BLD.gather(1, last_B11.expand(-1, 1, hidden_BLD.shape[-1])).squeeze(1)


class AttentionPooling(nn.Module):
    """Mean weighted by a learnt score of each real token: softmax(w . h) (Yang et al. 2016, NAACL)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.score = nn.Linear(hidden_size, 1, bias=False)  # a bias would drop out of the softmax

    def forward(self, hidden_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        dtype = torch.promote_types(hidden_BLD.dtype, torch.float32)
        score_BL = self.score(hidden_BLD).squeeze(-1).to(dtype)
        weight_BL = score_BL.masked_fill(mask_BL == 0, torch.finfo(dtype).min).softmax(dim=-1)
        # Not a matrix product: autocast would run that in the low precision.
        pooled_BD: Tensor = (hidden_BLD.to(dtype) * weight_BL.unsqueeze(-1)).sum(dim=1)
        return pooled_BD.to(hidden_BLD.dtype)


_POOLINGS = {"cls": pool_cls, "mean": pool_mean, "max": pool_max, "last": pool_last}


def _pooling(heads: HeadSettings, hidden_size: int) -> Callable[[Tensor, Tensor], Tensor]:
    if heads.pooling == "attention":
        return AttentionPooling(hidden_size)
    if own := POOLINGS.get(heads.pooling):
        options = options_of(heads.pooling, heads.option)
        pool: Callable[[Tensor, Tensor], Tensor] = own.make(hidden_size, options)
        shape, expected, problem = (2, 3, hidden_size), (2, hidden_size), f"but it is a {type(pool).__name__}"
        if callable(pool):
            problem = _wrong_output(pool, expected, torch.zeros(shape), torch.ones(2, 3, dtype=torch.long))
        if problem:
            raise CodeError(f"pooling: `{heads.pooling}` must give {expected} of states {shape}, {problem}.")
        return pool
    return _POOLINGS[heads.pooling]


def parameter_depths(model: MultitaskModel) -> dict[str, int]:
    """Return the depth of each parameter: 0 embeddings, 1 the lowest layer, N + 1 above the N layers.

    Embeddings include tables beside the layers, such as DeBERTa's relative positions, and their norm. N + 1
    are the heads, a norm after the last layer, and log variances.
    """
    layers = encoder_layers(model.encoder)
    depth = {id(parameter): n for n, layer in enumerate(layers, 1) for parameter in layer.parameters()}
    tables = {name for name, one in model.named_modules() if isinstance(one, nn.Embedding)}
    for name in tables:
        if name.endswith("rel_embeddings"):
            # DeBERTa norms its relative positions, and adds a convolution to its first layer.
            beside = dict(model.get_submodule(name.rpartition(".")[0]).named_children())
            parts = [(beside[part], n) for part, n in (("LayerNorm", 0), ("conv", 1)) if part in beside]
            depth |= {id(parameter): n for part, n in parts for parameter in part.parameters()}
    for name, parameter in model.named_parameters():
        embeds = "embed" in name or "relative_attention_bias" in name or name.rpartition(".")[0] in tables
        embeds = embeds and "embedding_norm" not in name  # LFM2's norm after the last layer
        above = 0 if name.startswith("encoder.") and embeds else len(layers) + 1
        depth.setdefault(id(parameter), above)
    return {name: depth[id(parameter)] for name, parameter in model.named_parameters()}


def _head(settings: HeadSettings, hidden_size: int, task: Task) -> nn.Module:
    p, inner, num_outputs = settings.head_dropout, settings.head_hidden_size, task.num_outputs
    name = settings.of(task)
    if own := HEADS.get(name):
        head: nn.Module = own.make(hidden_size, num_outputs, options_of(name, settings.option))
        _check_head(head, hidden_size, task, name)
        return head
    if name == "linear":
        return nn.Sequential(nn.Dropout(p), nn.Linear(hidden_size, num_outputs))
    hidden = (nn.Dropout(p), nn.Linear(hidden_size, inner), nn.GELU())
    return nn.Sequential(*hidden, nn.Dropout(p), nn.Linear(inner, num_outputs))


def _check_head(head: Any, hidden_size: int, task: Task, name: str) -> None:
    """Raise CodeError if a head of the study's own code is no module, or its logits have another shape."""
    shape = (2, 3, hidden_size) if task.level == "token" else (2, hidden_size)
    expected = (*shape[:-1], task.num_outputs)
    problem = f"but it is a {type(head).__name__}"
    if isinstance(head, nn.Module):
        problem = _wrong_output(head, expected, torch.zeros(shape))
    if problem:
        raise CodeError(
            f"head_type: `{name}` must be a module that for the task `{task.name}` gives logits {expected} "
            f"of states {shape}, {problem}."
        )


def _wrong_output(part: Callable[..., Any], expected: tuple[int, ...], *inputs: Tensor) -> str:
    """Return what a part of the study's own code gives or raises, in words; empty if the shape is expected.

    Raises CodeError with the line for an error in a line of this code.
    """
    if isinstance(part, nn.Module):
        part.eval()
    try:
        with errors_of_code(), torch.no_grad():
            made = part(*inputs)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        if is_out_of_memory(error):
            raise
        return f"but raises {type(error).__name__}: {error}"
    if isinstance(part, nn.Module):
        part.train()
    output = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
    return "" if output == expected else f"but gives {output}"


def build_model(
    encoder: Any,
    tasks: Sequence[Task],
    heads: HeadSettings,
    *,
    max_length: int,
    freeze_layers: int = 0,
    gradient_checkpointing: bool = False,
) -> MultitaskModel:
    """Return the model of one trial over an encoder of `load_encoder`, in training mode.

    The weights of the heads come from torch's global generator: call `torch.manual_seed` before. `max_length`
    is the longest window in tokens. `freeze_layers=n` freezes the embeddings and the lowest n layers; 0
    trains everything.

    Raises ModelError if the encoder cannot do a setting, or if a text's logits depend on its batch.
    """
    name = type(encoder).__name__
    positions = max_positions(encoder)
    if positions is not None and max_length > positions:
        raise ModelError(
            f"max_length must be at most the {positions} positions of this {name}, but it is {max_length}. "
            f"Shorten it and set `data.long_text: window` to lose no text, or use a longer encoder."
        )
    if heads.pooling == "cls" and is_causal(encoder):
        raise ModelError(
            f"pooling: `cls` is the state of the first token, which in this {name} sees nothing of the text. "
            "Use last or mean."
        )
    if gradient_checkpointing:
        if not getattr(encoder, "supports_gradient_checkpointing", False):
            raise ModelError(
                f"gradient_checkpointing: {name} does not support it. Set it to false; a smaller "
                f"micro_batch_size saves memory too."
            )
        # transformers renamed it between 5.17 and 5.23, and the old name warns.
        enable = getattr(encoder, "activation_checkpointing_enable", None)
        (enable or encoder.gradient_checkpointing_enable)({"use_reentrant": False})
    model = MultitaskModel(encoder, tasks, heads)
    check_texts_are_independent(model, max_length)
    if freeze_layers:
        _freeze(model, freeze_layers)
    use_bit_dropout(model)
    return model.train()


def _freeze(model: MultitaskModel, freeze_layers: int) -> None:
    """Stop gradients at the embeddings and the lowest layers; dropout in them stays on."""
    num_layers = len(encoder_layers(model.encoder))
    if freeze_layers > num_layers:
        raise ModelError(
            f"freeze_layers must be between 0 and the encoder's {num_layers} layers, but it is "
            f"{freeze_layers}."
        )
    depths = parameter_depths(model)
    for name, parameter in model.named_parameters():
        if depths[name] <= freeze_layers:
            parameter.requires_grad_(False)
