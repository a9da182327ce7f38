from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.tiny_encoders import FAMILIES, family_model, make_batch, make_model
from torch import Tensor

import hpo.models.attention
from hpo.data.batches import Batch
from hpo.models.attention import NAME, attention_forward, use_training_attention
from hpo.models.dropout import DropoutMaskGenerator

HEADS, SIZE, P = 3, 8, 0.2
LENGTHS = [9, 4, 9, 1, 7]
LAYER: Any = SimpleNamespace(is_causal=False)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    """Return query, key and value [B, H, L, E] as views of [B, L, H, E], and the mask of padding."""
    torch.manual_seed(1)
    shape = (len(LENGTHS), max(LENGTHS), HEADS, SIZE)
    tensors = [torch.randn(shape).to(dtype).transpose(1, 2).requires_grad_() for _ in range(3)]
    seen_BL = torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]
    return tensors, seen_BL[:, None, None, :].expand(-1, 1, shape[1], -1)


def reference(tensors: list[Tensor], mask: Tensor, drop: list[Tensor], scale: float) -> Tensor:
    """Compute plain attention in fp64 with the drawn masks: [B, L, H, E]."""
    query, key, value = (tensor.double() for tensor in tensors)
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~mask, float("-inf"))
    weights = scores.softmax(-1)
    keep = torch.zeros_like(weights)
    for text, length in enumerate(LENGTHS):
        keep[text, :, :length, :length] = drop[text][:, :length, :length].double()
    return ((weights * keep / (1 - P)) @ value).transpose(1, 2)


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The dropout of every call of the kernel."""
    calls: list[float] = []
    kernel = hpo.models.attention._DropoutAttention
    apply = kernel.apply
    monkeypatch.setattr(kernel, "apply", lambda *args: calls.append(args[-1].p) or apply(*args))
    return calls


@pytest.mark.parametrize("piece_elements", [1, 2 * HEADS * 81, 2**20])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)]
)
def test_output_and_gradients_equal_plain_attention(
    dtype: torch.dtype, tolerance: float, piece_elements: int, drawn: list[Tensor], monkeypatch: Any
) -> None:
    monkeypatch.setattr(hpo.models.attention, "PIECE_ELEMENTS", piece_elements)
    tensors, mask = inputs(dtype)
    output, weights = attention_forward(LAYER, *tensors, mask, dropout=P, scaling=0.3)
    assert (weights, output.dtype, len(drawn)) == (None, dtype, len(LENGTHS))
    expected = reference(tensors, mask, drawn, 0.3)
    real_BL = mask[:, 0, 0]
    torch.testing.assert_close(output[real_BL].double(), expected[real_BL], rtol=tolerance, atol=tolerance)
    upstream = torch.randn_like(expected) * real_BL[:, :, None, None]
    ours = torch.autograd.grad(output, tensors, upstream.to(dtype))
    theirs = torch.autograd.grad(expected, tensors, upstream.to(dtype).double())
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=2 * tolerance)


def test_large_scores_do_not_overflow_in_fp16(drawn: list[Tensor]) -> None:
    tensors, mask = inputs(torch.float16)
    query, key, value = tensors[0] * 5000, tensors[1] * 20, tensors[2]
    output, _ = attention_forward(LAYER, query, key, value, mask, dropout=P, scaling=1.0)
    assert drawn
    assert torch.matmul(query, key.transpose(-1, -2)).isinf().any()
    assert output.isfinite().all()


@pytest.mark.parametrize(
    "case", ["no dropout", "causal", "another mask", "padding in front", "an option", "one mask for all"]
)
def test_other_cases_run_pytorch(case: str, kernel_calls: list[float]) -> None:
    (query, key, value), mask = inputs()
    front = mask.flip(-1)[:, :, :1].expand_as(mask)
    others = {"another mask": mask.contiguous(), "padding in front": front, "one mask for all": mask[1:2]}
    mask, dropout = others.get(case, mask), 0.0 if case == "no dropout" else P
    layer: Any = SimpleNamespace(is_causal=case == "causal")
    options = {"is_causal": False} if case == "an option" else {}
    torch.manual_seed(5)
    output, _ = attention_forward(layer, query, key, value, mask, dropout=dropout, scaling=0.3, **options)
    torch.manual_seed(5)
    expected = F.scaled_dot_product_attention(query, key, value, mask, dropout_p=dropout, scale=0.3)
    torch.testing.assert_close(output, expected.transpose(1, 2))
    assert not kernel_calls


@pytest.mark.parametrize("family", FAMILIES)
def test_kernel_equals_own_attention(family: str, kernel_calls: list[float], monkeypatch: Any) -> None:
    """The masks keep everything; the batch has padding, short texts and a part without padding."""
    keep_all = lambda _self, shape, _p: torch.full(tuple(shape), -1, dtype=torch.int16)  # noqa: E731
    monkeypatch.setattr(DropoutMaskGenerator, "keep_mask", keep_all)
    model = family_model(family, dropout=0.0, head_dropout=0.0, attention_dropout=1e-9)
    ids_BL, mask_BL = make_batch((12, 3, 7, 12))
    trained = model(ids_BL, mask_BL)["spans"]
    assert bool(kernel_calls) == (model.encoder.config._attn_implementation == NAME)
    evaluated = model.eval()(ids_BL, mask_BL)["spans"]
    if kernel_calls:
        real_BL = mask_BL.bool()
        torch.testing.assert_close(trained[real_BL], evaluated[real_BL], rtol=1e-4, atol=1e-5)
    whole = model(ids_BL[[0, 3]], None)["spans"]
    torch.testing.assert_close(whole, evaluated[[0, 3]], rtol=1e-4, atol=1e-5)


def test_device_gets_a_mask_only_for_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU uses its flash kernel only without a mask. A meta device raises if the code waits for it."""
    masks: list[bool] = []

    def attend(_: Any, query: Tensor, *args: Tensor | None, **__: Any) -> tuple[Tensor, None]:
        masks.append(args[-1] is not None)
        return query.transpose(1, 2), None

    model = make_model("minilm").eval().to("meta")
    monkeypatch.setattr(hpo.models.attention, "sdpa_attention_forward", attend)
    for lengths in ((6, 6), (6, 4)):
        batch = Batch(*make_batch(lengths), None, {}, np.arange(2), np.array(lengths)).to("meta")
        model(*batch.inputs)
    assert masks == [False] * 6 + [True] * 6


@pytest.mark.parametrize("trains", [True, False])
def test_compiled_model_is_one_graph(trains: bool) -> None:
    compiled = torch.compile(make_model().train(trains), backend="eager", fullgraph=True)
    with use_training_attention(), torch.autocast("cpu", torch.bfloat16):
        assert compiled(*make_batch()).keys() == {"label", "spans"}
    torch._dynamo.reset()


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The drawn masks, [H, L, L] for each text, 1 at kept values."""
    masks: list[Tensor] = []
    draw = DropoutMaskGenerator.keep_mask

    def keep_mask(self: DropoutMaskGenerator, shape: Any, p: float) -> Tensor:
        mask = draw(self, shape, p)
        masks.extend((mask != 0).unflatten(0, (-1, HEADS)))
        return mask

    monkeypatch.setattr(DropoutMaskGenerator, "keep_mask", keep_mask)
    return masks
