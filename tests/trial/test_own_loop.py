"""Trials with their own training loop: outcomes, precision, steps, checkpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.own_loops import HEAD, LOOP, own_executor
from support.resumed_trials import check_resume_is_exact, run_trial, weights_of
from torch import nn

from hpo.errors import InputError, Paused, Pruned
from hpo.outcome import TrialResult
from hpo.random_numbers import seed_all
from hpo.training.evaluate import Evaluation
from hpo.trial.telemetry import Callbacks

RATE = {"learning_rate": 0.01}


def run(executor: Any, folder: Path | None = None, **params: Any) -> TrialResult:
    result: TrialResult = executor.run(RATE | params, folder, "trial")
    return result


def changed(old: str, new: str) -> str:
    assert old in LOOP
    return LOOP.replace(old, new)


@pytest.mark.parametrize(
    ("precision", "products"), [("fp32", "float32"), ("bf16", "bfloat16"), ("bf16-true", "bfloat16")]
)
def test_facts_of_a_complete_trial(tmp_path: Path, precision: str, products: str) -> None:
    result = run(own_executor(tmp_path), tmp_path / "trial", fp_precision=precision)
    assert result.outcome == "complete", result.traceback or result.reason
    told = result.telemetry
    assert told["precision"]["effective"] == precision
    assert told["precision"]["observed"]["linear_products"] == {products: 2}
    assert told["precision"]["agrees"] is True
    assert told["compatibility"]["verdict"] in ("ok", "degraded")
    assert told["compatibility"]["logits_relative_error"].keys() == {"output"}
    assert (told["num_steps"], told["num_examples"]) == (9, 144)
    assert told["throughput"]["train_examples_per_second"] > 0
    assert told["throughput"]["train_tokens_per_second"] is None
    assert result.values == (told["metrics"]["reported"]["accuracy"],)
    weight = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert weights_of(tmp_path / "trial")["model.0.weight"].dtype == weight


def test_fp32_step_is_a_plain_step_of_pytorch(tmp_path: Path) -> None:
    """The same numbers bit for bit: seed, dropout, clipping, AdamW."""
    assert run(own_executor(tmp_path), tmp_path / "trial").outcome == "complete"
    code: dict[str, Any] = {}
    exec(HEAD, code)
    rows, classes = code["ROWS"], code["CLASSES"]
    seed_all(3)
    model = code["net"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    best, kept = -1.0, {}
    for _ in range(3):
        model.train()
        for chosen in torch.randperm(48).split(16):
            optimizer.zero_grad()
            code["loss_of_batch"](model, (rows[chosen], classes[chosen])).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        with torch.no_grad():
            accuracy = float((model.eval()(rows).argmax(1) == classes).float().mean())
        if accuracy >= best:
            best, kept = accuracy, {name: value.clone() for name, value in model.state_dict().items()}
    stored = weights_of(tmp_path / "trial")
    assert all(torch.equal(stored[f"model.{name}"], value) for name, value in kept.items())


# Ends


OVERFLOW = """
class Overflowing(nn.Linear):
    def forward(self, rows):
        hidden = super().forward(rows)
        return hidden * (1.0 if hidden.dtype == torch.float32 else torch.inf)

def net(width):
    return nn.Sequential(nn.Linear(4, width), Overflowing(width, 2))
"""


@pytest.mark.parametrize(
    ("loop", "params", "outcome", "reason"),
    [
        (OVERFLOW + LOOP, {"fp_precision": "bf16"}, "incompatible", "logits not finite under bf16"),
        (OVERFLOW + LOOP, {"fp_precision": "fp32"}, "complete", ""),
        (LOOP, {"fp_precision": "tf32"}, "unsupported", "tf32"),
        (changed("run.report({", "run.report({'loss': torch.nan, "), {}, "nonfinite", "loss is nan"),
        (changed("ROWS[rows], CL", "ROWS[rows] * torch.inf, CL"), {}, "nonfinite", "not finite in 3 steps"),
        (changed("        run.report(", "        print("), {}, "invalid", "returned without a report"),
        (changed('{"accuracy"', '{"recall"'), {}, "invalid", "the metric accuracy of an objective"),
        (changed("        model.train()", "        1 / 0"), {}, "failed", "ZeroDivisionError"),
    ],
)
def test_outcomes(tmp_path: Path, loop: str, params: dict[str, Any], outcome: str, reason: str) -> None:
    result = run(own_executor(tmp_path, loop), tmp_path / "trial", **params)
    assert result.outcome == outcome, result.traceback
    assert reason in result.reason


@pytest.mark.parametrize(
    ("step", "outcome"),
    [
        ("amp.step(loss_of_batch, (ROWS[rows] * torch.inf, CLASSES[rows]), optimizer)", "nonfinite"),
        ("run.report({'accuracy': torch.nan})", "nonfinite"),
        ("run.report({})", InputError),
    ],
)
def test_function_cannot_swallow_the_end(tmp_path: Path, step: str, outcome: Any) -> None:
    careless = (
        f"            try:\n                {step}\n            except Exception:\n                pass"
    )
    loop = changed("            amp.step(loss_of_batch, (ROWS[rows], CLASSES[rows]), optimizer)", careless)
    executor = own_executor(tmp_path, loop)
    if outcome is InputError:
        with pytest.raises(InputError, match="must be given a mapping"):
            run(executor)
    else:
        assert run(executor).outcome == outcome


def test_nonfinite_step_is_repeated_in_fp32(tmp_path: Path) -> None:
    """The model works in the check. Its fault is in later batches."""
    loop = OVERFLOW.replace("== torch.float32", "== torch.float32 or len(rows) < 16") + LOOP
    result = run(own_executor(tmp_path, loop), fp_precision="bf16")
    assert (result.outcome, result.telemetry["finite_in_fp32"]) == ("nonfinite", True)
    amp = {"allow_emulated": True, "fallback_to_fp32": True}
    result = run(own_executor(tmp_path, loop, amp=amp), tmp_path / "fallen", fp_precision="bf16")
    assert (result.outcome, result.telemetry["fp32_fallbacks"]) == ("complete", 9)
    assert run(own_executor(tmp_path, loop), tmp_path / "fp32", fp_precision="fp32").outcome == "complete"
    first, second = weights_of(tmp_path / "fallen"), weights_of(tmp_path / "fp32")
    assert all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('run.params["width"]', 'run.params["depth"]', "must fix `depth` under `training` or search it"),
        (
            "        model.train()",
            "        run.keep(late=net())",
            "must be called before `run.steps`",
        ),
        (
            "    run.keep(",
            "    run.prepare(model, loss_of_batch, (ROWS[:8], CLASSES[:8]))\n    run.keep(",
            "must be called once",
        ),
        ("optimizer=optimizer)", "optimizer=3)", "`optimizer` must have `state_dict`"),
        ("run.keep(model=model, ", "run.keep(", "must hold the model of `run.prepare`"),
        ('{"accuracy": accuracy(model, amp)}', "{}", "must be given a mapping"),
        ('{"accuracy": accuracy(model, amp)}', '{"peak_memory_bytes": 1}', "a name of its own"),
        ('{"accuracy": accuracy(model, amp)}', '{"accuracy": 1}, done=7', "must be above 0 and at most 1"),
        ("net(run", "net(run.params['seed']).bfloat16() or (run", "all weights must be in torch.float32"),
    ],
)
def test_misuse_of_the_interface(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        run(own_executor(tmp_path, changed(old, new)), tmp_path / "trial")


# Checkpoints


@pytest.mark.parametrize("stop_at", [4, 5, 8])
def test_resume_is_exact(tmp_path: Path, stop_at: int) -> None:
    """It stops in the middle of a round, or between two, and draws from all generators."""
    draws = "random.random() + numpy.random.rand() + float(torch.rand(()))"
    loop = changed("        model.train()", f"        ROWS[0, 0] = {draws}\n        model.train()")
    loop = f"import random, numpy\n{loop}"
    result = check_resume_is_exact(
        own_executor(tmp_path, loop), tmp_path, stop_at, fp_precision="fp32", **RATE
    )
    assert result.telemetry["num_steps"] == 9


def test_pause_after_the_round_and_immediate_pruning(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    note = f"\n        with open({str(notes)!r}, 'a') as file:\n            file.write('x')\n"
    executor = own_executor(tmp_path, LOOP.rstrip() + note)

    def at(end: type[Exception], index: int) -> Callbacks:
        def end_there(scored: Evaluation) -> None:
            if scored.index == index:
                raise end("told so")

        return Callbacks(end_there)

    paused = executor.run(RATE, tmp_path / "paused", "trial", at(Paused, 1))
    assert (paused.outcome, notes.read_text()) == ("paused", "x"), "the code behind the report ran"
    resumed = executor.run(RATE, tmp_path / "paused", "trial", at(Pruned, 2))
    assert (resumed.outcome, notes.read_text()) == ("pruned", "x")
    assert resumed.telemetry["resumed_from_step"] == 3
    assert resumed.telemetry["num_steps"] == 6


# Loops of other libraries


FOREIGN = """
@hpo.trial
def train(run):
    model = net()
    OBSERVE
    run.keep(model=model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(run.step, 4):
        model.train()
        with torch.autocast("cpu", torch.bfloat16, enabled=ENABLED):
            loss = loss_of_batch(model, (ROWS, CLASSES))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=ENABLED):
            accuracy = (model(ROWS).argmax(1) == CLASSES).float().mean()
        run.count_step(48)
        run.report({"accuracy": accuracy}, done=(step + 1) / 4)
"""


def foreign(enabled: str, observe: str = "run.observe(model)") -> str:
    return FOREIGN.replace("OBSERVE", observe).replace("ENABLED", enabled)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_loop_of_another_library_is_observed(tmp_path: Path, precision: str) -> None:
    executor = own_executor(tmp_path, foreign("run.precision.name == 'bf16'"))
    result = run(executor, tmp_path / "trial", fp_precision=precision)
    assert result.outcome == "complete", result.traceback or result.reason
    assert result.telemetry["precision"]["agrees"] is True
    assert result.telemetry["num_steps"] == 4
    unobserved = own_executor(tmp_path / "other", foreign("run.precision.name == 'bf16'", "pass"))
    plain = run(unobserved, tmp_path / "plain", fp_precision=precision)
    assert plain.telemetry["precision"]["agrees"] is None
    assert plain.telemetry["precision"]["observed_reason"].startswith(
        "nothing was observed: call `run.prepare`, or "
    )
    first, second = weights_of(tmp_path / "trial"), weights_of(tmp_path / "plain")
    assert all(torch.equal(value, second[name]) for name, value in first.items()), "it changes nothing"


@pytest.mark.parametrize(
    ("precision", "enabled", "where"),
    [
        (
            "bf16",
            "False",
            r"bf16, but in training 2 of 2 weights .* bfloat16: 0.weight \(float32",
        ),
        ("fp32", "True", "fp32, but in training"),
        ("fp32", "not model.training", "fp32, but in evaluation"),
    ],
)
def test_loop_in_another_precision_ends_the_trial(
    tmp_path: Path, precision: str, enabled: str, where: str
) -> None:
    result = run(own_executor(tmp_path, foreign(enabled)), fp_precision=precision)
    assert result.outcome == "invalid"
    assert re.search(where, result.reason), result.reason


def test_unobserved_steps_are_unverified(tmp_path: Path) -> None:
    """The check says nothing about the function's own steps."""
    prepare = "run.prepare(model, loss_of_batch, (ROWS, CLASSES))"
    result = run(own_executor(tmp_path, foreign("False", prepare)), fp_precision="bf16")
    assert result.outcome == "complete", result.traceback or result.reason
    assert result.telemetry["precision"]["agrees"] is None
    assert result.telemetry["precision"]["observed_reason"].startswith("steps were made without `amp.step`")


UNMEASURED = """
def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows @ weight.T

def note(ctx, inputs, output):
    ctx.rows = inputs[0]

hidden = torch.library.custom_op("own_loops::hidden", mutates_args=())(product)
hidden.register_autograd(lambda ctx, grad: (None, grad.T @ ctx.rows), setup_context=note)

class Changing(nn.Linear):
    def forward(self, rows):
        return hidden(rows, self.weight) + self.bias if self.training else super().forward(rows)

def net():
    return nn.Sequential(Changing(4, 2))
"""


def test_unmeasured_product_in_training_stays_unverified(tmp_path: Path) -> None:
    """The products of the evaluation are measured."""
    result = run(own_executor(tmp_path, UNMEASURED + foreign("False")), fp_precision="fp32")
    assert result.outcome == "complete", result.traceback or result.reason
    assert result.telemetry["precision"]["agrees"] is None
    assert "could not be measured" in result.telemetry["precision"]["observed_reason"]


# PyTorch's compiler looks at the attribute where it traces the hook of the check.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_model_is_unverified(tmp_path: Path) -> None:
    """Its eager products were seen, but a trial runs the compiled ones."""
    compiles = "    model.compile(backend='eager')\n    amp = run.prepare("
    result = run(own_executor(tmp_path, changed("    amp = run.prepare(", compiles)), fp_precision="fp32")
    assert result.outcome == "complete", result.traceback or result.reason
    assert result.telemetry["precision"]["agrees"] is None
    later = changed("    run.keep(", "    model.compile(backend='eager')\n    run.keep(")
    result = run(own_executor(tmp_path, later), fp_precision="fp32")
    assert (result.outcome, result.telemetry["precision"]["agrees"]) == ("complete", None)


def test_unread_setting_is_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = {"width": 8, "rounds": 1, "dropuot": 0.1}
    result = run(own_executor(tmp_path, training=training))
    assert result.telemetry["unread_settings"] == ["dropuot"]
    assert "did not read `dropuot`" in caplog.text
    assert "unread_settings" not in run(own_executor(tmp_path)).telemetry


def test_loop_of_another_library_resumes_from_its_last_report(tmp_path: Path) -> None:
    executor = own_executor(tmp_path, foreign("False"))
    assert run_trial(executor, tmp_path / "cut", 3, fp_precision="fp32", **RATE).outcome == "preempted"
    result = run_trial(executor, tmp_path / "cut", fp_precision="fp32", **RATE)
    assert result.outcome == "complete"
    assert (result.telemetry["resumed_from_step"], result.telemetry["num_steps"]) == (2, 4)


# Before the first trial


def test_check_runs_the_function_to_its_first_step(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    loop = changed(
        "            amp.step(", f"            open({str(notes)!r}, 'a').close()\n            amp.step("
    )
    executor = own_executor(tmp_path, loop)
    executor.check_study()
    assert not notes.exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("torch.optim.AdamW", "torch.optim.AdamV", r"own\.py:\d+: AttributeError: .*AdamV"),
        ("net(run", "nets(run", r"own\.py:\d+: NameError: .*nets"),
        ("(ROWS[:8]", "(ROWS[:8] * torch.nan", "cannot run in fp32: .*not finite in fp32"),
        ('run.params["width"]', 'run.params["depth"]', "must fix `depth`"),
    ],
)
def test_check_shows_the_line_of_an_error(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        own_executor(tmp_path, changed(old, new)).check_study()
