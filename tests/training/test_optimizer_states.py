"""Moments in fewer bits: as exact as their tables, steps near those in fp32, and a restart bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from test_optim import check_it_goes_on_bit_for_bit, group
from tiny import CPU, EMULATED
from torch import Tensor, nn
from torch.optim import Optimizer

from hpo.precision.amp import MixedPrecision
from hpo.precision.table import PRECISIONS
from hpo.training.loop import apply_gradients
from hpo.training.optim import DECODED_ELEMENTS, build_optimizer, optimizer_state_facts
from hpo.training.optimizer_states import (
    BLOCKS,
    MIN_ELEMENTS,
    SIGNED,
    decode,
    dynamic_fractions,
    encode,
    is_kept_short,
    nearest,
)

SHORT = tuple(BLOCKS)
BYTES = {"bf16": 2.0, "fp8": 1 + 4 / 256, "int8": 1 + 4 / 256, "int4": 0.5 + 4 / 128}
SHAPE = (64, 128)


def moments(seed: int = 0) -> Tensor:
    """Of seven powers of ten, and zero."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(SHAPE, generator=draw) * torch.logspace(-7, 0, SHAPE[0])[:, None]
    values[3] = 0
    return values


@pytest.mark.parametrize("kind", SHORT)
@pytest.mark.parametrize("name", SIGNED)
def test_a_moment_comes_back_within_its_format(kind: str, name: str) -> None:
    moment = moments() if SIGNED[name] else moments().square()
    encoded = encode(moment, name, kind, 1)
    back = decode(encoded, name, kind, moment.shape)
    assert back.dtype == torch.float32
    largest = moment.view(-1, 128 if kind == "bf16" else BLOCKS[kind]).abs().amax(1, keepdim=True)
    error = (back - moment).abs().view(len(largest), -1)
    signed = SIGNED[name]
    if kind in ("bf16", "fp8"):  # of the number itself, or of the smallest that there is
        share = {"bf16": 1 / 128, "fp8": 1 / 16}[kind]
        assert (error <= (moment.abs() * share * 1.001).view_as(error) + largest * 2e-6).all()
    else:  # of the largest: half of the widest gap between two fractions; without 0, the first of them
        share = {"int8": 0.01, "int4": 0.15 if signed else 1 / 16}[kind]
        assert (error <= largest * share + 1e-30).all()
    assert sum(part.nbytes for part in encoded.values()) == pytest.approx(moment.numel() * BYTES[kind])
    if (kind, SIGNED[name]) != ("int4", False):
        assert (back[3] == 0).all(), "what had no gradient must not move"
    else:
        assert (back > 0).all(), "a step is divided by its root"


def test_bf16_is_rounded_by_chance_to_the_right_mean() -> None:
    value = torch.full(SHAPE, 1 + 1 / 512)  # a quarter of the way from 1 to the next
    mean = torch.stack([encode(value, "exp_avg", "bf16", seed)["codes"].float() for seed in range(20)]).mean()
    assert float(mean) == pytest.approx(1 + 1 / 512, abs=1e-4)
    one, same, other = (encode(moments(), "exp_avg", "bf16", seed)["codes"] for seed in (5, 5, 6))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_the_tables_are_those_that_were_published() -> None:
    signed, unsigned = (dynamic_fractions(8, signed=one) for one in (True, False))
    assert (len(set(signed)), len(set(unsigned)), len(set(dynamic_fractions(4, signed=True)))) == (
        256,
        256,
        16,
    )
    assert (signed[-1], unsigned[0], unsigned[-1]) == (1.0, 0.0, 1.0)
    assert min(unsigned[1:]) == pytest.approx(0.325e-6)
    assert sorted(abs(value) for value in signed if value < 0) == [v for v in signed if 0 < v < 1]


@pytest.mark.parametrize(
    ("kind", "name"), [("int8", "AdamW8bit"), ("int4", "AdamW4bit"), ("fp8", "AdamWFp8")]
)
@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.filterwarnings("ignore")
def test_thirty_steps_end_where_those_of_torchao_do(kind: str, name: str) -> None:
    import torchao.optim

    draw = torch.Generator().manual_seed(1)
    weight, _ = (nn.Parameter(torch.randn(SHAPE, generator=draw)) for _ in range(2))
    target = torch.randn((2, *SHAPE), generator=draw)[0]
    optimizer = getattr(torchao.optim, name)([weight], lr=0.02, weight_decay=0.01)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(30):
            weight.grad = weight.detach() - target
            optimizer.step()
    assert (run(kind)[0] - weight.detach()).square().mean().sqrt() < 1e-3


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("signed", [True, False])
def test_the_nearest_fraction_is_found_by_its_first_bits(kind: str, signed: bool) -> None:
    """Also of the numbers next to where one fraction ends and the next begins."""
    table = torch.tensor(dynamic_fractions(8 if kind == "int8" else 4, signed=signed))
    if kind == "int4" and not signed:
        table = torch.linspace(0, 1, 17)[1:]
    ends = (table[1:] + table[:-1]) / 2
    one = torch.ones(())
    near = [ends, ends.nextafter(one), ends.nextafter(-one), table, table.nextafter(-one)]
    drawn = torch.rand(100_000, generator=torch.Generator().manual_seed(1)) ** 9
    numbers = torch.cat([*near, drawn, torch.tensor([0.0, -0.0, 1e-38, 1e-44])])
    numbers = torch.cat([numbers, -numbers]) if signed else numbers.abs()
    expected = torch.bucketize(numbers, ends, out_int32=True)
    assert torch.equal(nearest(numbers, kind, signed=signed), expected)


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.filterwarnings("ignore")
def test_the_codes_are_those_of_torchao() -> None:
    from torchao.optim.quant_utils import create_dynamic_map, quantize_8bit_with_qmap, scale_tensor

    for bits, exponents, signed in ((8, 7, True), (8, 7, False), (4, 3, True)):
        assert dynamic_fractions(bits, signed=signed) == create_dynamic_map(signed, exponents, bits)
    scaled, _ = scale_tensor(moments(), 256)
    theirs = quantize_8bit_with_qmap(scaled, torch.tensor(create_dynamic_map(True, 7, 8)))
    assert torch.equal(encode(moments(), "exp_avg", "int8", 1)["codes"].view(SHAPE), theirs)


def run(
    kind: str, name: str = "adamw", dtype: torch.dtype = torch.float32, shape: tuple[int, int] = SHAPE
) -> tuple[Tensor, Tensor, Optimizer]:
    """A matrix and an embedding after 30 steps towards two targets."""
    draw = torch.Generator().manual_seed(1)
    weight, embedding = (nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for _ in range(2))
    targets = torch.randn((2, *shape), generator=draw)
    groups = [group(each, lr=0.02, weight_decay=0.01) for each in (weight, embedding)]
    optimizer = build_optimizer(name, groups, state=kind, fp32_state=[embedding])
    for _ in range(30):
        for parameter, target in zip((weight, embedding), targets, strict=True):
            parameter.grad = (parameter.detach().float() - target).to(dtype)
        optimizer.step()
    return weight.detach().float(), embedding.detach().float(), optimizer


@pytest.mark.parametrize("kind", SHORT)
@pytest.mark.parametrize("name", ["adamw", "adam", "lion"])
def test_steps_are_near_those_in_fp32_and_of_embeddings_the_same(kind: str, name: str) -> None:
    """fp32's moments, decoded from nothing: 30 steps of 0.02 move a weight by 0.6."""
    plain, short = run("fp32", name), run(kind, name)
    assert torch.equal(plain[1], short[1]), "the embedding's state is in fp32"
    error = (short[0] - plain[0]).square().mean().sqrt()
    assert 0 < error < {"int4": 0.2, "int8": 0.04, "fp8": 0.04, "bf16": 0.005}[kind]
    facts = optimizer_state_facts(short[2], kind)
    count = len(
        [one for one in SIGNED if one in ("momentum" if name == "lion" else ("exp_avg", "exp_avg_sq"))]
    )
    assert (facts["requested"], facts["effective"], facts["reason"]) == (kind, kind, "")
    assert facts["fp32_bytes"] == 2 * count * 4 * plain[0].numel()
    assert facts["bytes"] == pytest.approx(count * plain[0].numel() * (4 + BYTES[kind]))


@pytest.mark.parametrize("kind", SHORT)
def test_a_tensor_that_blocks_do_not_divide_is_kept_short_as_well(kind: str) -> None:
    """As embeddings of the tokens that the data use, of which there are any number."""
    odd = (67, 127)
    weight, _, optimizer = run(kind, shape=odd)
    assert optimizer_state_facts(optimizer, kind)["effective"] == kind
    error = (weight - run("fp32", shape=odd)[0]).square().mean().sqrt()
    assert 0 < error < {"int4": 0.2, "int8": 0.04, "fp8": 0.04, "bf16": 0.005}[kind]


PROGRAM = """
import torch
from hpo.training.optim import build_optimizer
torch.manual_seed(0)
weight = torch.nn.Parameter(torch.randn(64, 64))
groups = [{"params": [weight], "lr": 0.01, "weight_decay": 0.01}]
optimizer = build_optimizer("adamw", groups, state="bf16")
for _ in range(20):
    weight.grad = torch.randn(64, 64)
    optimizer.step()
print(weight.double().sum().item())
"""


def test_chances_are_the_same_in_another_process() -> None:
    """Whose strings have other hashes: a trial goes on in another one, and each rank is one."""
    said = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1


def test_what_is_too_small_stays_in_fp32_and_is_said() -> None:
    assert not is_kept_short(torch.empty(MIN_ELEMENTS - 1), "int8")
    assert is_kept_short(torch.empty(MIN_ELEMENTS), "int8")
    plain, short = run("fp32", shape=(4, 4)), run("int8", shape=(4, 4))
    assert torch.equal(plain[0], short[0])
    facts = optimizer_state_facts(short[2], "int8")
    assert (facts["requested"], facts["effective"]) == ("int8", "fp32")
    assert "large enough" in facts["reason"]


@pytest.mark.parametrize("kind", SHORT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_restored_optimizer_goes_on_bit_for_bit(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    check_it_goes_on_bit_for_bit("adamw", dtype, SHAPE, tmp_path / "optimizer.pt", state=kind)


@pytest.mark.parametrize("kind", SHORT)
def test_a_skipped_step_changes_neither_weights_nor_moments(kind: str) -> None:
    ends = []
    for bad_step in (None, 0, 1):
        weight = nn.Parameter(moments(3))
        optimizer: Any = build_optimizer("adamw", [group(weight, lr=0.01, weight_decay=0.1)], state=kind)
        amp = MixedPrecision(PRECISIONS["fp32"], EMULATED, CPU)
        for step in range(3):
            if step == bad_step:
                weight.grad = torch.full_like(weight, torch.nan)
                apply_gradients(nn.ParameterList([weight]), optimizer, torch.zeros(()), amp, 1.0)
            weight.grad = moments(step) - 1
            apply_gradients(nn.ParameterList([weight]), optimizer, torch.zeros(()), amp, 1.0)
        ends.append(weight.detach().clone())
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


def test_between_steps_no_moment_is_there_in_fp32_and_chunks_are_small() -> None:
    shapes = [(DECODED_ELEMENTS // 512, 512), (4096, 256), (256, 256)]
    weights = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    optimizer: Any = build_optimizer("adamw", [{"params": weights, "lr": 0.1}], state="int8")
    assert len(optimizer.chunks) == 2
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert all("exp_avg" not in state for state in optimizer.inner.state.values())
    assert all((weight < 0).all() for weight in weights)
