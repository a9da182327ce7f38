"""Training of the used rows of an embedding table.

A vocabulary has tens of thousands of tokens, a data set a few thousand. The other rows have no gradient, but
cost as much: MiniLM's table is half of its weights, so half of the gradient in every step is zeros.
`compact_vocabulary` trains a table of the used rows alone.

The result equals training of the whole table. Rows without gradient all decay by the same factor, whatever
the schedule, clipping and skipped steps: Adam's moments are zero there, and decoupled decay, momentum and L2
terms of SGD are linear in the weight. An extra row of ones is trained along and becomes that factor. The
module's state is the whole table, so checkpoints and exports are the usual ones.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn


class CompactEmbedding(nn.Embedding):
    """The rows `used_ids` of an embedding table. Inputs are ids in the whole table."""

    def __init__(self, table: nn.Embedding, used_ids: Tensor) -> None:
        whole = table.weight.detach()
        rows = torch.cat([whole[used_ids], whole.new_ones(1, table.embedding_dim)])
        row_of_id = torch.full((table.num_embeddings,), -1, device=whole.device)
        row_of_id[used_ids] = torch.arange(len(used_ids), device=whole.device)
        padding = None if table.padding_idx is None else int(row_of_id[table.padding_idx])
        super().__init__(len(rows), table.embedding_dim, padding_idx=padding, _weight=rows)
        self.used_ids = used_ids
        self._whole = whole
        self.register_buffer("row_of_id", row_of_id, persistent=False)
        self.row_of_id: Tensor

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Embedding names it
        """Look up ids of any shape. With gradients, an id without a row raises IndexError (on a CPU)."""
        rows = self.row_of_id[input]
        if not torch.is_grad_enabled():  # an own callback may use any token
            others = self._whole[input] * self.weight[-1]
            return torch.where((rows < 0)[..., None], others, F.embedding(rows.clamp(min=0), self.weight))
        if rows.device.type == "cpu" and not torch.compiler.is_compiling() and bool((rows < 0).any()):
            raise IndexError(
                f"Token {int(input[rows < 0][0])} is in no text of the data, so its row is not trained. "
                "Look it up under torch.no_grad()."
            )
        return F.embedding(rows, self.weight, self.padding_idx)

    def whole(self) -> Tensor:
        """Return the whole table, with the decay of unused rows."""
        weight = self.weight.detach()
        table = self._whole.to(weight) * weight[-1]
        table[self.used_ids] = weight[:-1]
        return table

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:  # noqa: ARG002
        destination[f"{prefix}weight"] = self.whole()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Load the used rows of a whole table, and measure the decay in the other ones."""
        table = state_dict[f"{prefix}weight"].to(self.weight)
        is_unused = self.row_of_id < 0
        before, now = self._whole[is_unused].double(), table[is_unused].double()
        norm = before.square().sum()
        factor = (before * now).sum() / norm if norm else norm + 1
        last = torch.full_like(table[:1], float(factor))
        state = {f"{prefix}weight": torch.cat([table[self.used_ids], last])}
        super()._load_from_state_dict(state, prefix, *rest)


def compact_vocabulary(model: nn.Module, optimizer: str, used_ids: NDArray[Any]) -> None:
    """Train only the embedding rows `used_ids` of `model.encoder`, if the result is the same.

    It differs for a table in bf16 (each weight rounds differently), with settings or tied weights, under adam
    (its L2 term is not linear in a weight without gradient) and adafactor (it reads the whole matrix).
    """
    encoder: Any = model.encoder
    try:
        table = encoder.get_input_embeddings()
    except NotImplementedError:  # CANINE hashes characters into several tables
        return
    if (
        optimizer not in ("adamw", "lion", "sgd")
        or type(table) is not nn.Embedding
        or not table.weight.requires_grad
        or table.weight.dtype != torch.float32
        or table.max_norm is not None
        or table.scale_grad_by_freq
        or table.sparse
        or sum(weight is table.weight for _, weight in model.named_parameters(remove_duplicate=False)) != 1
    ):
        return
    padding = [] if table.padding_idx is None else [table.padding_idx]
    used_ids = np.union1d(used_ids, padding).astype(np.int64)
    ids = torch.from_numpy(used_ids).to(table.weight.device)
    name = next(name for name, module in encoder.named_modules() if module is table)
    if type(encoder).__module__.startswith("transformers.") or _only_calls(encoder, name, ids[:8]):
        encoder.set_submodule(name, CompactEmbedding(table, ids))


def _only_calls(encoder: nn.Module, name: str, ids: Tensor) -> bool:
    """Return True if the encoder only calls the table `name`: other code may read its weight itself."""
    table: Any = encoder.get_submodule(name)
    weight = table.weight.detach()
    inputs = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids[None])}

    read = {f"{name}.weight": torch.full_like(weight, torch.nan)}
    called = lambda _module, args, kwargs, _output: F.embedding((*args, *kwargs.values())[0], weight)  # noqa: E731
    with table.register_forward_hook(called, with_kwargs=True), torch.no_grad():
        output = torch.func.functional_call(encoder, read, kwargs=inputs)
    return bool(output.last_hidden_state.isfinite().all())
