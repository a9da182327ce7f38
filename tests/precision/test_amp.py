"""Autocast, scaling, fallback and finiteness against plain PyTorch."""

import math
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from support.tiny import CPU_PRECISIONS, amp_of
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from hpo.errors import Nonfinite
from hpo.precision.amp import (
    NONFINITE_PATIENCE,
    AmpStatistics,
    backend_flags,
    float32_buffers,
    prepare_model,
    tf32_is_on,
)
from hpo.precision.frozen import FrozenLinear
from hpo.precision.table import PRECISIONS, AmpConfig
from hpo.training.loop import apply_gradients

FINITE, INF = torch.tensor(1.0), torch.tensor(math.inf)


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("name", PRECISIONS)
def test_backend_flags_and_their_older_names(name: str, tf32: bool) -> None:
    backends, precision = torch.backends, PRECISIONS[name]

    def state() -> tuple[str, bool, bool]:
        matmul = torch.get_float32_matmul_precision()
        return matmul, backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32

    before, is_on = state(), precision.tf32 or (tf32 and precision.autocast is not None)
    with backend_flags(precision, AmpConfig(tf32=tf32, cudnn_benchmark=True)):
        assert (tf32_is_on(), backends.cudnn.benchmark) == (is_on, True)
        assert state() == ("high" if is_on else "highest", is_on, is_on)
        with backend_flags(PRECISIONS["fp32"], AmpConfig()):
            assert state() == ("highest", False, False)
        assert state() == ("high" if is_on else "highest", is_on, is_on)
    assert state() == before


def test_limits_of_fp32_fallbacks() -> None:
    """They hold for an epoch. A repeated step counts its fallbacks once."""
    amp = amp_of("bf16", fallback_to_fp32=True, max_fp32_fallbacks=2)
    assert amp.state_dict()["epoch_fallbacks"] == 0
    for _ in range(3):
        amp.start_epoch()
        for _ in range(3):
            amp.start_step()
            amp.falls_back(INF)
        amp.end_step(amp.step_fallbacks)
        assert amp.state_dict()["epoch_fallbacks"] == 1
        amp.end_step(1)
    assert amp.statistics().fp32_fallbacks == 6
    with pytest.raises(Nonfinite, match="more than 2 micro-batches of one epoch"):
        amp.end_step(1)


def test_autocast_and_weights_of_precisions() -> None:
    for name, precision in PRECISIONS.items():
        if not precision.float8:
            model = prepare_model(nn.ModuleList([nn.Linear(2, 2), nn.BatchNorm1d(2)]), precision)
            dtypes = [str(weight.dtype) for weight in model.parameters()]
            assert dtypes == [f"torch.{precision.weights}"] * 2 + ["torch.float32"] * 2
        for context in (amp_of(name).autocast(), amp_of(name).evaluation()):
            with context:
                assert torch.is_autocast_enabled("cpu") == (precision.autocast is not None)
        with amp_of(name).autocast(enabled=False):
            assert not torch.is_autocast_enabled("cpu")


def test_compiler_cache_by_precision() -> None:
    config = torch.compiler.config
    with config.patch(cache_key_tag="user"):
        for name, precision in PRECISIONS.items():
            with backend_flags(precision, AmpConfig()):
                assert config.cache_key_tag == f"user/{name}"
        assert config.cache_key_tag == "user"


SWITCHES = {"cuda.matmul", *("cudnn", "cudnn.conv", "cudnn.rnn")}
SWITCHES |= {"mkldnn", "mkldnn.conv", "mkldnn.matmul", "mkldnn.rnn"}
"""All objects with an `fp32_precision` below `torch.backends`."""


def all_switches(module: Any = torch.backends, path: str = "") -> set[str]:
    found = set()
    # A module of `torch.backends` may be a wrapper with an inner module `m`. The cache of FFTs needs a GPU.
    names = {*dir(module), *dir(type(module)), *dir(getattr(module, "m", module))}
    for name in names - {"m", "cufft_plan_cache"}:
        value = None if name.startswith("_") else getattr(module, name, None)
        is_module = isinstance(value, ModuleType)
        where = value.__name__ if is_module else type(value).__module__
        if where.startswith("torch.backends"):
            found |= {path + name} if hasattr(value, "fp32_precision") else set()
            found |= all_switches(value, f"{path}{name}.") if is_module else set()
    return found


def test_every_switch_of_fp32_products_is_set() -> None:
    assert all_switches() == SWITCHES, "PyTorch has a new switch"
    own = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    operations = [(kind, op) for kind in ("cuda", "mkldnn") for op in ("matmul", "conv", "rnn")]
    everything = [("generic", "all"), ("cuda", "all"), ("mkldnn", "all"), *operations]
    before = {where: own[0](*where) for where in everything}
    try:
        for where in everything:
            own[1](*where, "tf32")
        with backend_flags(PRECISIONS["fp32"], AmpConfig()):
            assert {own[0](*where) for where in operations} == {"ieee"}
        assert {own[0](*where) for where in operations} == {"tf32"}
    finally:
        for where, value in before.items():
            own[1](*where, value)


@pytest.mark.parametrize("name", ["bf16", "fp16", "bf16-true"])
def test_fp32_fallback_of_an_infinite_loss(name: str) -> None:
    amp = amp_of(name, fallback_to_fp32=True)
    assert not amp.falls_back(FINITE)
    assert amp.falls_back(INF)
    amp.end_step(amp.step_fallbacks)
    assert amp.statistics().fp32_fallbacks == 1
    assert not amp_of(name).falls_back(INF), "without fallback"
    assert not amp_of("fp32", fallback_to_fp32=True).falls_back(INF), "it is fp32"


def test_gradients_of_an_fp32_fallback() -> None:
    linear = nn.Linear(4, 4, dtype=torch.bfloat16)
    amp = amp_of("bf16-true", fallback_to_fp32=True)
    with amp.float32(linear) as in_float32:
        output = in_float32(torch.ones(1, 4))
    assert output.dtype == torch.float32
    output.sum().backward()
    assert linear.weight.grad.dtype == torch.bfloat16


def end_of(name: str, bad_steps: Sequence[bool], check_every: int, *, is_loss: bool) -> str:
    """Return the reason for the end of a training with these steps; empty: it continues."""
    amp = amp_of(name)
    try:
        for number, is_bad in enumerate(bad_steps, start=1):
            bad = INF if is_bad else FINITE
            amp.record_step(bad if is_loss else FINITE, bad)
            if number % check_every == 0 or number == len(bad_steps):
                amp.check()
    except Nonfinite as error:
        return str(error)
    return ""


@pytest.mark.parametrize("is_loss", [True, False])
@pytest.mark.parametrize(
    ("name", "bad_steps", "ends"),
    [
        ("bf16", [True] * 17 + [False] * 3, True),
        ("fp16", [True] * 17 + [False] * 3, True),
        ("fp32", [False] * 18 + [True] * 3 + [False], True),
        ("bf16", [True, True, False] * 20, False),
    ],
)
def test_nonfinite_end_at_all_intervals(name: str, bad_steps: list[bool], ends: bool, is_loss: bool) -> None:
    """A CPU checks every step, a GPU every 20th."""
    (reason,) = {end_of(name, bad_steps, check_every, is_loss=is_loss) for check_every in (1, 7, 20)}
    said = f"the {'loss was' if is_loss else 'gradients were'} not finite in 3 steps in a row."
    assert reason == (said if ends and (is_loss or name != "fp16") else "")


@pytest.mark.parametrize("loss", [INF, FINITE])
def test_bad_steps_before_and_after_a_checkpoint(loss: Tensor) -> None:
    amp, resumed = amp_of("bf16"), amp_of("bf16")
    for _ in range(NONFINITE_PATIENCE - 1):
        amp.record_step(loss, INF)
    resumed.load_state_dict(amp.state_dict())
    resumed.check()
    resumed.record_step(loss, INF)
    with pytest.raises(Nonfinite, match="in 3 steps in a row"):
        resumed.check()


def test_scale_before_the_first_loss() -> None:
    """A rank without rows scales no loss, but gets gradients from other ranks."""
    amp, weight = amp_of("fp16", init_scale=8.0), nn.Parameter(torch.tensor(1.0))
    weight.grad = torch.tensor(16.0)
    amp.scaler.unscale_(torch.optim.SGD([weight], lr=0.1))
    assert weight.grad == 2.0


def test_overflow_at_the_lowest_scale() -> None:
    amp = amp_of("fp16", init_scale=4.0, backoff_factor=0.5, min_scale=1.0)
    weight = nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scales = []
    for _ in range(3):
        amp.scaler.scale(weight * math.inf).backward()
        amp.scaler.unscale_(optimizer)
        amp.record_step(FINITE, weight.grad.norm())
        amp.scaler.step(optimizer)
        amp.scaler.update()
        optimizer.zero_grad()
        scales.append(amp.scaler.get_scale())
        if len(scales) < 3:
            amp.check()
    assert scales == [2.0, 1.0, 0.5]
    assert float(weight.detach()) == 1.0
    statistics = amp.statistics()
    assert (statistics.skipped_steps, statistics.scale_min, statistics.scale_max) == (3, 1.0, 4.0)
    assert statistics.scale_mean == pytest.approx(7 / 3)
    with pytest.raises(Nonfinite, match="loss scale at its floor of 1"):
        amp.check()


def test_update_of_the_config() -> None:
    amp = amp_of("fp16")
    amp.scale_value()
    amp.update_amp_config(init_scale=8.0, growth_factor=4.0, growth_interval=5, backoff_factor=0.25)
    scaler = amp.scaler
    assert (scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor()) == (8.0, 4.0, 0.25)
    assert scaler.get_growth_interval() == 5
    with pytest.raises(ValidationError, match="growth_factor"):
        amp.update_amp_config(growth_factor=0.5)
    with pytest.raises(ValueError, match="preset cannot change inside a trial"):
        amp.update_amp_config(preset="basic")


@pytest.mark.parametrize("name", CPU_PRECISIONS)
def test_state_in_a_checkpoint(name: str) -> None:
    amp = amp_of(name, init_scale=1024.0)
    amp.record_step(FINITE, INF)
    other = amp_of(name)
    other.load_state_dict(amp.state_dict())
    assert other.statistics() == amp.statistics()
    assert other.scaler.get_scale() == amp.scaler.get_scale()
    other.load_state_dict({"epoch_fallbacks": 2.0})
    assert other.scaler.get_scale() == amp.scaler.get_scale(), "an older checkpoint has no scaler"
    assert other.state_dict()["epoch_fallbacks"] == 2
    other.reset_statistics()
    assert other.statistics() == AmpStatistics()
    silent = amp_of("fp16", track_stats=False)
    silent.record_step(FINITE, INF)
    assert silent.statistics().skipped_steps is None


class Mixed(nn.Module):
    """Frequencies, a table, a norm with running statistics, and a weight that its model keeps in fp32."""

    _keep_in_fp32_modules_strict = ("kept",)

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        self.stored = FrozenLinear(nn.Linear(4, 4), "int8")
        for name in ("inv_freq", "table"):
            self.register_buffer(name, torch.ones(4))


def test_buffers_beside_bf16_weights() -> None:
    """As `model.bfloat16()` does, except for frequencies, and tensors that belong to others in fp32."""
    model = prepare_model(Mixed(), PRECISIONS["bf16-true"])
    named = [*model.named_parameters(), *model.named_buffers()]
    narrow = {name for name, value in named if value.dtype == torch.bfloat16}
    assert narrow == {"linear.weight", "linear.bias", "table", "stored.bias"}
    assert float32_buffers(model) == ["inv_freq", "stored.scale"]
    lowered = prepare_model(Mixed(), replace(PRECISIONS["bf16-true"], keeps_rotary=False))
    assert float32_buffers(lowered) == ["stored.scale"]
    autocast = prepare_model(Mixed(), PRECISIONS["bf16"])
    assert {one.dtype for one in autocast.buffers()} == {torch.float32, torch.int64}


def test_fp32_repeat_has_buffers_in_fp32() -> None:
    """A spectral norm multiplies its buffers by the weight."""
    model = prepare_model(parametrizations.spectral_norm(nn.Linear(4, 4)), PRECISIONS["bf16-true"])
    with amp_of("bf16-true").float32(model) as call:
        assert call(torch.ones(2, 4)).dtype == torch.float32


@pytest.mark.parametrize(("rate", "least", "most"), [(1e-2, 0.95, 1.0), (1e-5, 0.005, 0.5), (0.0, 0.0, 0.0)])
def test_share_of_bf16_weights_that_steps_move(rate: float, least: float, most: float) -> None:
    """Adam moves each weight by about `rate`. Against a count of all weights after all steps."""
    torch.manual_seed(0)
    weight, other = (
        nn.Parameter(torch.randn(100, 100).bfloat16() / 20),
        nn.Parameter(torch.ones(3).bfloat16()),
    )
    amp, optimizer = amp_of("bf16-true"), torch.optim.Adam([weight, other], lr=rate)
    shares = []
    for _ in range(20):
        weight.grad, before = torch.randn(100, 100).sign().bfloat16(), weight.detach().clone()
        apply_gradients([weight, other], optimizer, FINITE, amp, 0.0)
        shares.append(float((weight != before).float().mean()))
    found = amp.moved_share()
    assert found is not None
    assert least <= found <= most
    assert abs(found - sum(shares) / len(shares)) < 0.1


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("fused", [(False, False), (True, True), (True, False)])
def test_several_optimizers_step_together(precision: str, fused: tuple[bool, bool]) -> None:
    """All skip a step that one must skip; then they equal one optimiser over all weights."""
    weights = [nn.Parameter(torch.ones(3)) for _ in range(4)]
    pairs = [*zip(weights[:2], fused, strict=True)]
    several = [torch.optim.SGD([one], lr=0.1, fused=is_fused) for one, is_fused in pairs]
    together = torch.optim.SGD(weights[2:], lr=0.1)
    amp, reference = (amp_of(precision, init_scale=4.0) for _ in range(2))
    for broken in (math.inf, 1.0, 1.0):
        for group, optimizer, scaler in ((weights[:2], several, amp), (weights[2:], together, reference)):
            loss = (group[0] * broken + 3 * group[1]).sum()
            for one in group:
                one.grad = None
            scaler.scaler.scale(loss).backward()
            apply_gradients(group, optimizer, FINITE, scaler, 1.0)
        assert (float(weights[1].detach()[0]) == 1) == (broken == math.inf)
    torch.testing.assert_close(weights[:2], weights[2:])
    assert amp.scaler.get_scale() == reference.scaler.get_scale()


def test_weights_in_fp32_are_not_counted() -> None:
    weight = nn.Parameter(torch.ones(4))
    amp, optimizer = amp_of("bf16"), torch.optim.SGD([weight], lr=0.1)
    for _ in range(4):
        weight.grad = torch.ones(4)
        apply_gradients([weight], optimizer, FINITE, amp, 0.0)
    assert amp.moved_share() is None


@pytest.mark.parametrize(("first", "least"), [(1024.0, 1e-37), (1.0, 1.0), (0.5, 1.0)])
def test_loss_scale_never_becomes_zero(first: float, least: float) -> None:
    """PyTorch's scaler at 0 divides by it, and writes NaN into the weights."""
    amp = amp_of("fp16", init_scale=first, backoff_factor=1e-30, min_scale=least)
    weight = nn.Parameter(torch.tensor(1.0))
    optimizer, scales = torch.optim.SGD([weight], lr=0.1), []
    for factor in (math.inf, math.inf, math.inf, 1.0):
        optimizer.zero_grad()
        amp.scaler.scale(weight * factor).backward()
        apply_gradients([weight], optimizer, FINITE, amp, 0.0)
        scales.append(amp.scaler.get_scale())
    assert min(scales) == pytest.approx(min(first, least))
    assert float(weight.detach()) == pytest.approx(0.9)
    with pytest.raises(Nonfinite, match="loss scale at its floor"):
        amp.check()
