"""Products that only a pass forward and backward shows, compared with plain PyTorch."""

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.observed_products import observed
from support.tiny import amp_of
from support.tiny_encoders import DECODERS, FAMILIES, make_batch, make_model
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from hpo.precision.effective import observe, observe_model
from hpo.precision.observation import LOSS, changed_conditions, conditions
from hpo.precision.table import PRECISIONS

X, Y = torch.randn(6, 16), torch.arange(6) % 2


class Middle(nn.Module):
    """Two linear layers around `compute(module, hidden)`, which may use the matrix `weight`."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor], holds: str = "parameter") -> None:
        super().__init__()
        self.first, self.out, self.compute = nn.Linear(16, 16), nn.Linear(16, 2), compute
        weight = torch.randn(16, 16) / 4
        if holds == "parameter":
            self.weight = nn.Parameter(weight)
        elif holds == "buffer":
            self.register_buffer("weight", weight)
        else:
            self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.compute(self, torch.tanh(self.first(x)))))


class OwnProduct(Function):
    """A product with the factors rounded by `forward_as` and, in the backward pass, by `backward_as`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward_as: Any, backward_as: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.backward_as = backward_as
        return (forward_as(x) @ forward_as(weight).t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, gradient = map(ctx.backward_as, (*ctx.saved_tensors, *gradients))
        return (gradient @ weight).float(), (gradient.t() @ x).float(), None, None


def own(forward_as: Any, backward_as: Any) -> Any:
    return lambda model, x: OwnProduct.apply(x.float(), model.weight, forward_as, backward_as)


class Recomputed(Function):
    """An activation checkpoint that forgets autocast."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor, *_: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().float().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        return None, *torch.autograd.grad(y, [x, *ctx.layer.parameters()], gradients[0].to(y.dtype))


def recomputed(model: Any, x: Tensor) -> Tensor:
    return Recomputed.apply(model.first, x, *model.first.parameters())


def attention(dtype: torch.dtype, p: float = 0.0, *, is_manual: bool = False) -> Any:
    def compute(model: Any, x: Tensor) -> Tensor:
        heads = model.first(x).view(1, 6, 2, 8).transpose(1, 2).to(dtype)
        with torch.autocast("cpu", enabled=False):
            if is_manual:
                made = torch.softmax(heads @ heads.transpose(-1, -2), -1) @ heads
            else:
                made = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=p)
        return made.transpose(1, 2).reshape(6, 16).to(x.dtype)

    return compute


def in_thread(model: Any, x: Tensor) -> Tensor:
    results, has_gradients = [], torch.is_grad_enabled()

    def compute() -> None:
        with torch.set_grad_enabled(has_gradients):
            results.append(F.linear(x, model.weight))

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    return results[0]


class InNumpy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return torch.from_numpy(x.numpy() @ weight.numpy().T)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] @ ctx.saved_tensors[0], None


def plain_linear(model: Any, x: Tensor) -> Tensor:
    return F.linear(x, model.weight)


def in_dtype(dtype: torch.dtype) -> Any:
    def compute(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.linear(x.to(dtype), model.weight.to(dtype)).to(x.dtype)

    return compute


def cached(model: Any, x: Tensor) -> Tensor:
    if not hasattr(model, "copy"):
        model.copy = model.weight.detach().bfloat16()
    return F.linear(x.bfloat16(), model.copy).float() + 0 * model.weight.sum()


def dotted(model: Any, x: Tensor) -> Tensor:
    return (
        torch.stack([torch.dot(row.bfloat16(), model.weight[0].bfloat16()) for row in x]).float()[:, None] * x
    )


FLOAT, BF16 = Tensor.float, Tensor.bfloat16
NOT_SEEN = "No product was seen of matrices that the model uses: weight."


@pytest.mark.parametrize(
    ("compute", "holds", "name", "agrees", "reason"),
    [
        (own(FLOAT, FLOAT), "parameter", "fp32", True, "^$"),
        (own(FLOAT, BF16), "parameter", "fp32", False, r"float32: weight \(bfloat16, backward\)"),
        (own(BF16, FLOAT), "parameter", "bf16", False, r"bfloat16: weight \(float32, backward\)"),
        (recomputed, "none", "bf16", False, r"first.weight \(float32, backward\)"),
        (attention(torch.float32), "none", "fp32", True, "^$"),
        (attention(torch.bfloat16), "none", "bf16", True, "^$"),
        (attention(torch.bfloat16, 0.1), "none", "bf16", True, "^$"),
        (attention(torch.bfloat16), "none", "fp32", False, r"not in float32: Middle \(bfloat16\)"),
        (attention(torch.bfloat16, 0.1), "none", "fp32", False, r"Middle \(bfloat16\)"),
        (attention(torch.float32), "none", "bf16", False, r"not in bfloat16: Middle \(float32\)"),
        (attention(torch.float32, 0.1), "none", "bf16", False, r"Middle \(float32\)"),
        (attention(torch.float32, is_manual=True), "none", "bf16", False, r"Middle \(float32\)"),
        (plain_linear, "buffer", "bf16", True, "^$"),
        (in_dtype(torch.bfloat16), "buffer", "fp32", False, r"float32: weight \(bfloat16\)"),
        (in_dtype(torch.float32), "buffer", "bf16", False, r"bfloat16: weight \(float32\)"),
        (in_dtype(torch.bfloat16), "attribute", "fp32", False, r"float32: weight \(bfloat16\)"),
        (cached, "parameter", "fp32", False, r"float32: copy \(bfloat16\)"),
        (dotted, "parameter", "fp32", False, r"float32: weight \(bfloat16\)"),
        (in_thread, "parameter", "fp32", None, NOT_SEEN),
        (lambda model, x: InNumpy.apply(x, model.weight), "parameter", "fp32", None, NOT_SEEN),
    ],
)
def test_products_outside_of_plain_forward_passes(
    compute: Any, holds: str, name: str, agrees: bool | None, reason: str
) -> None:
    model = Middle(compute, holds)
    if holds == "none":
        del model.weight
    model(X)  # fills a cache
    seen = observe_model(model, amp_of(name), lambda model: model(X))
    agreement = seen.agreement(PRECISIONS[name])
    assert agreement.agrees is agrees, agreement
    assert re.search(reason, agreement.reason), agreement.reason


class Experts(nn.Module):
    """The second expert has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.experts[0](x), self.experts[1](x[:0])])


class Positions(nn.Module):
    """Matrices without a product: a table, positions and a scale; and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out, self.unused = nn.Embedding(9, 16), nn.Linear(16, 9), nn.Linear(16, 16)
        self.positions, self.scale = nn.Parameter(torch.randn(6, 16)), nn.Parameter(torch.randn(6, 16))

    def forward(self, x: Tensor) -> Tensor:
        ids = x.abs().long().clamp(max=8)[:, :2].T
        hidden = self.table(ids) + self.positions * self.scale.exp()
        return self.out(hidden) + F.linear(hidden, self.table.weight)


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


ORDINARY: dict[str, Callable[[], nn.Module]] = {
    "experts": Experts,
    "embedding, positions, unused matrix": Positions,
    "gru": lambda: nn.GRU(16, 16),
    "attention": lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (4, 4)), nn.Conv1d(4, 8, 3), nn.Flatten()),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 4)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(16, 4)),
    "frozen": lambda: nn.Sequential(nn.Linear(16, 16).requires_grad_(False), nn.Linear(16, 4)),
    "checkpoint": lambda: Checkpointed(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)),
}


@pytest.mark.parametrize("kind", ORDINARY)
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_ordinary_modules_agree(kind: str, name: str) -> None:
    torch.manual_seed(0)
    seen = observed(name, ORDINARY[kind](), X)
    assert seen.agreement(PRECISIONS[name]) == (True, "")
    assert max(seen.shares("backward").items(), key=lambda each: each[1])[0] == PRECISIONS[name].products


class Dtypes(TorchDispatchMode):
    """Independent of the engine: the dtypes of PyTorch's matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[torch.dtype]] = {}
        self.phase = "forward"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.seen.setdefault(self.phase, set()).add(args[-1].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["bert", "deberta-v2", "llama"])
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_flops_and_dtypes_are_those_of_pytorch(family: str, name: str) -> None:
    """One step, counted by PyTorch's `FlopCounterMode` and by a plain dispatch mode."""
    config, kernel = FAMILIES.get(family) or (DECODERS[family], "eager")
    model = make_model(config, attention="eager" if family == "bert" else kernel)

    def step(mode: Any) -> None:
        with amp_of(name).autocast():
            loss = sum(value.float().sum() for value in model(*make_batch()).values())
        mode.phase = "backward"
        loss.backward()
        model.zero_grad()

    with FlopCounterMode(display=False) as counter:
        step(counter)
    with Dtypes() as plain:
        step(plain)
    with observe(model) as seen:
        step(seen)
    # PyTorch counts outer products too, of rotary frequencies and of one row.
    assert 0.98 * counter.get_total_flops() < sum(seen.flops.values()) <= counter.get_total_flops()
    for phase in ("forward", "backward"):
        kinds = {str(dtype).removeprefix("torch.") for dtype in plain.seen[phase]}
        assert kinds <= seen.shares(phase).keys()
        assert seen.shares(phase)[PRECISIONS[name].products] > 0.9


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_fast_path_of_transformer_encoder(dtype: torch.dtype | None, masked: bool) -> None:
    """The same numbers as without observation, or the same error of PyTorch."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    padding = torch.arange(4)[None] >= torch.tensor([[4], [3]]) if masked else None

    def call() -> Any:
        with torch.no_grad(), torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            try:
                return model(X.view(2, 3, 16).repeat(1, 2, 1)[:, :4], src_key_padding_mask=padding)
            except RuntimeError as error:
                return str(error)

    plain = call()
    with observe(model) as seen:
        made = call()
    if isinstance(plain, str):
        assert made == plain
        return
    assert torch.equal(made, plain)
    formats = {str(dtype or torch.float32).removeprefix("torch.")}
    assert len(seen.products) == 8
    assert set.union(*seen.products.values(), *seen.others.values()) == formats


class Bilinear(nn.Bilinear):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x)


def test_bilinear_products_are_reduced_only_in_the_forward_pass() -> None:
    """PyTorch saves its inputs in fp32, and runs the products of its backward pass without autocast."""
    seen = observed("bf16", Bilinear(16, 16, 4), X)
    assert seen.agreement(PRECISIONS["bf16"]).reason.endswith("bfloat16: weight (float32, backward).")
    assert seen.shares("forward").keys() == {"bfloat16"}
    assert observed("fp32", nn.LSTM(16, 16), X).agreement(PRECISIONS["fp32"]) == (True, "")


class UnderAutocast(nn.Linear):
    def __init__(self, inputs: int, outputs: int, amp: Any) -> None:
        super().__init__(inputs, outputs)
        self.amp = amp

    def forward(self, x: Tensor) -> Tensor:
        with self.amp.autocast():
            return super().forward(x)


def test_loss_may_be_wider_but_not_narrower() -> None:
    def loss_in(dtype: torch.dtype) -> Any:
        def call(model: nn.Module) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                out = model(X).to(dtype)
                return (out @ out.t()).float().sum()

        return call

    for name, dtype, agrees in (("bf16", torch.float32, True), ("fp32", torch.bfloat16, False)):
        amp = amp_of(name)
        seen = observe_model(UnderAutocast(16, 4, amp), amp, loss_in(dtype))
        agreement = seen.agreement(PRECISIONS[name])
        assert agreement.agrees is agrees
        assert (LOSS in agreement.reason) is not agrees


def test_changed_conditions() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = conditions(model)
    assert changed_conditions(before, model) == ""
    model[1].bfloat16()
    said = changed_conditions(before, model)
    assert said.endswith(
        "1.weight (torch.float32, then torch.bfloat16), 1.bias (torch.float32, then torch.bfloat16)."
    )
    switch = torch.backends.mkldnn.matmul
    kept = switch.fp32_precision
    try:
        switch.fp32_precision = "bf16"
        assert "fp32 matmul on cpu" in changed_conditions(before, nn.Linear(4, 4))
    finally:
        switch.fp32_precision = kept


def test_random_numbers_and_gradients_of_an_observed_step_are_plain() -> None:
    def step(is_observed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 2))
        if is_observed:
            with observe(model):
                F.cross_entropy(model(X), Y).backward()
        else:
            F.cross_entropy(model(X), Y).backward()
        return [*(one.grad for one in model.parameters()), torch.rand(3)]

    assert all(map(torch.equal, step(True), step(False)))
