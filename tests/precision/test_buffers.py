"""Buffers of skipped and repeated steps, against a plain loop that never sees the bad batch."""

import copy
from pathlib import Path
from typing import Any

import torch
from support.own_loops import own_executor
from support.resumed_trials import weights_of
from support.tiny import altered_executor
from support.tiny_loop import train_for
from torch import Tensor, nn

from hpo.models.multitask import MultitaskModel
from hpo.precision.buffers import StepBuffers
from hpo.training.budget import Budget

ROWS = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
SKIPPED, MADE = torch.tensor(1.0), torch.tensor(0.0)


def net() -> nn.Module:
    torch.manual_seed(0)
    first = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    model = nn.Sequential(first, nn.BatchNorm1d(4), nn.Linear(4, 2))
    model.register_buffer("table", torch.zeros(3))  # which no step changes
    return model


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in model.named_buffers()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_steps_that_are_made_skipped_or_repeated() -> None:
    model = net()
    plain, kept = copy.deepcopy(model), StepBuffers(model)
    for rows, skipped in ((ROWS[:8], MADE), (ROWS * torch.inf, SKIPPED), (ROWS[8:], MADE)):
        kept.begin_step()
        model(rows)
        kept.begin_step()  # memory was out: the same step again
        model(rows)
        kept.end_step(skipped)
        if not skipped:
            plain(rows)
        assert_equal(buffers_of(model), buffers_of(plain))


def test_module_that_trains_later() -> None:
    model = net()
    model[1].eval()
    kept = StepBuffers(model)
    for rows, skipped in ((ROWS, MADE), (2 * ROWS, MADE), (ROWS * torch.inf, SKIPPED)):
        before = buffers_of(model)
        kept.begin_step()
        model(rows)
        kept.end_step(skipped)
        model[1].train()
    assert_equal(buffers_of(model), before)


LOOP = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
    def forward(self, rows):
        wide = rows.float().abs().max() > 100
        # Too large for fp16 alone
        return self.last(self.norm(self.first(rows) * (1e6 if wide else 1)))

@hpo.trial
def train(run):
    torch.manual_seed(1)
    model = Net()
    amp = run.prepare(model, loss_of_batch, (ROWS[:8], CLASSES[:8]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run.keep(model=model)
    for _ in run.steps(1):
        for number in range(4):
            batch = ROWS[12 * number :][:12] * (200 if number == 1 else 1)
            amp.step(loss_of_batch, (batch, CLASSES[:12]), optimizer)
        run.report({"accuracy": 1.0})
"""


def statistics_of(folder: Path, **study: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    result = own_executor(folder, LOOP, **study).run({}, folder / "trial", "trial")
    assert result.outcome == "complete", result.traceback or result.reason
    weights = weights_of(folder / "trial")
    return dict(result.telemetry), {name: each for name, each in weights.items() if "norm" in name}


def own_study(precision: str, **amp: Any) -> dict[str, Any]:
    amp = {"allow_emulated": True, "track_stats": True, **amp}
    return {"training": {"seed": 3, "fp_precision": precision}, "amp": amp, "search_space": {}}


def test_own_loop_skips_a_step_or_repeats_it_in_fp32(tmp_path: Path) -> None:
    _, exact = statistics_of(tmp_path / "fp32", **own_study("fp32"))
    told, repeated = statistics_of(tmp_path / "repeated", **own_study("fp16", fallback_to_fp32=True))
    assert told["fp32_fallbacks"] == 1
    assert repeated["model.norm.num_batches_tracked"] == exact["model.norm.num_batches_tracked"] == 4
    torch.testing.assert_close(repeated, exact, rtol=0.02, atol=0.02)
    told, skipped = statistics_of(tmp_path / "skipped", **own_study("fp16"))
    assert told["scaler"]["skipped_steps"] == 1
    assert skipped["model.norm.num_batches_tracked"] == 3
    assert float(skipped["model.norm.running_var"].max()) < 10


class Normed(nn.Module):
    """A head's layer with a batch norm, whose second batch is not finite."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.num_calls = nn.BatchNorm1d(size), 0

    def forward(self, pooled: Tensor) -> Tensor:
        self.num_calls += self.training
        result: Tensor = self.norm(pooled * (torch.inf if self.training and self.num_calls == 2 else 1))
        return result


def test_training_loop_of_hpo(tmp_path: Path) -> None:
    def alter(model: MultitaskModel) -> None:
        model.heads[0] = nn.Sequential(Normed(32), model.heads[0])

    executor = altered_executor(tmp_path, alter)
    trained = train_for(executor, Budget(max_steps=4), fp_precision="fp32")
    assert trained.mixed_precision.statistics().skipped_steps == 1
    norm: Any = trained.model.get_submodule("heads.0.0.norm")
    assert int(norm.num_batches_tracked) == 3
    assert bool(norm.running_mean.isfinite().all())
