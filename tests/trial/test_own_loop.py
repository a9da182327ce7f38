"""Trials with their own training loop: outcomes, precision, steps, checkpoints."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.own_loops import HEAD, LOOP, own_executor
from support.resumed_trials import check_resume_is_exact, weights_of
from torch import nn

from hpo.errors import InputError, Paused, Pruned
from hpo.outcome import TrialResult
from hpo.precision.table import PRECISIONS
from hpo.random_numbers import seed_all
from hpo.training.evaluate import Evaluation
from hpo.trial.telemetry import Callbacks

RATE = {"learning_rate": 0.01}


def run(executor: Any, folder: Path | None = None, **params: Any) -> TrialResult:
    return executor.run(RATE | params, folder, "trial")


def changed(old: str, new: str) -> str:
    assert old in LOOP
    return LOOP.replace(old, new)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-true"])
def test_facts_of_a_complete_trial(tmp_path: Path, precision: str) -> None:
    executor = own_executor(tmp_path, training={"seed": 3, "width": 8, "rounds": 3, "dropuot": 0.1})
    result = run(executor, tmp_path / "trial", fp_precision=precision)
    assert result.outcome == "complete", result.traceback or result.reason
    told = result.telemetry
    assert (told["precision"]["effective"], told["precision"]["agrees"]) == (precision, True)
    assert told["precision"]["observed"]["linear_products"] == {PRECISIONS[precision].products: 2}
    assert told["compatibility"]["logits_relative_error"].keys() == {"output"}
    assert (told["num_steps"], told["num_examples"], told["unread_settings"]) == (9, 144, ["dropuot"])
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


PART = """
@hpo.trial
def train(run):
    model, scale = net().eval(), nn.Parameter(torch.ones(()))
    loss_of_batch = lambda model, rows: (model(rows).float() * scale).square().mean()
    amp = run.prepare(model, loss_of_batch, ROWS)
    optimizer = torch.optim.SGD([model[3].weight, scale], lr=run.params["learning_rate"])
    run.keep(model=model)
    for _ in run.steps(3):
        amp.step(loss_of_batch, ROWS, optimizer)
        run.report({"accuracy": 1.0})
"""


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_step_is_of_the_parameters_of_the_optimizer(tmp_path: Path, precision: str) -> None:
    """One layer of the model, and a parameter beside the model."""
    executor = own_executor(tmp_path, PART)
    assert run(executor, tmp_path / "trial", fp_precision=precision).outcome == "complete"
    code: dict[str, Any] = {}
    exec(HEAD, code)
    seed_all(3)
    model, scale = code["net"]().eval(), nn.Parameter(torch.ones(()))
    stepped = [model[3].weight, scale]
    optimizer = torch.optim.SGD(stepped, lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        (model(code["ROWS"]) * scale).square().mean().backward()
        nn.utils.clip_grad_norm_(stepped, 1.0)
        optimizer.step()
    weight = weights_of(tmp_path / "trial")["model.3.weight"]
    torch.testing.assert_close(weight, model[3].weight.detach(), rtol=1e-4, atol=1e-5)


def test_step_clears_gradients_beside_the_optimizer(tmp_path: Path) -> None:
    step = "amp.step(loss_of_batch, ROWS, optimizer)"
    norms = f"{{{step} and model[0].weight.grad.norm().item() for _ in range(3)}}"
    still = PART.replace('run.params["learning_rate"]', "0.0").replace(step, f"assert len({norms}) == 1")
    result = run(own_executor(tmp_path, still))
    assert result.outcome == "complete", result.reason


def test_step_without_a_gradient_is_invalid(tmp_path: Path) -> None:
    unused = PART.replace("[model[3].weight, scale]", "[nn.Parameter(torch.ones(1))]")
    result = run(own_executor(tmp_path, unused))
    assert result.outcome == "invalid"
    assert "no parameter of the optimizer has a gradient" in result.reason


SEVERAL = """
@hpo.trial
def train(run):
    model = nn.ModuleDict({"made": nn.Linear(4, 4), "judge": nn.Linear(4, 1), "other": nn.Linear(4, 2)})
    judged = lambda model, rows: (model["judge"](model["made"](rows).detach()) - 1).square().mean()
    made = lambda model, rows: model["judge"](model["made"](rows)).abs().mean()
    both = lambda model, rows: made(model, rows) + model["other"](rows).square().mean()
    amp = run.prepare(model, both, ROWS)
    rate = run.params["learning_rate"]
    first, second = torch.optim.SGD(model["made"].parameters(), rate), torch.optim.Adam(
        model["judge"].parameters(), rate
    )
    third = torch.optim.AdamW(model["other"].parameters(), rate)
    newton = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=4)
    run.keep(model=model)
    losses = []
    for _ in run.steps(3):
        LOOP
        run.report({"accuracy": 1.0})
    run.folder.joinpath("losses").write_text(repr(losses))
"""
GAN = "losses += [float(amp.step(judged, ROWS, second)), float(amp.step(made, ROWS, first))]"
TOGETHER = "losses += [float(amp.step(both, ROWS, (first, second, third)))]"
NEWTON = "losses += [float(amp.step(both, ROWS, newton))]"


def plain_steps(step: str, enabled: bool, norm: float) -> tuple[list[float], dict[str, Any]]:
    """Run `SEVERAL` with PyTorch alone, as its AMP examples do with several losses and optimisers."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, enabled=enabled)
    code: dict[str, Any] = {}
    exec(HEAD, code)

    class Amp:
        def step(self, loss_of: Any, rows: Any, optimizers: Any) -> Any:
            several = optimizers if isinstance(optimizers, tuple) else (optimizers,)
            stepped = [one for each in several for one in each.param_groups[0]["params"]]

            def closure() -> Any:
                run.model.zero_grad()
                with torch.autocast("cpu", torch.float16, enabled=enabled):
                    loss = loss_of(run.model, rows)
                scaler.scale(loss).backward()
                for each in several if enabled else ():
                    scaler.unscale_(each)
                nn.utils.clip_grad_norm_(stepped, norm)
                return loss

            if isinstance(optimizers, torch.optim.LBFGS):
                return optimizers.step(closure).detach()
            loss = closure()
            for each in several:
                scaler.step(each)
            scaler.update()
            return loss.detach()

    class Run:
        folder, params = Path(), RATE

        def prepare(self, model: Any, *_: Any) -> Any:
            self.model = model
            return Amp()

        def keep(self, **_: Any) -> None: ...

        def steps(self, number: int) -> Any:
            return range(number)

        def report(self, _: Any) -> None: ...

    run: Any = Run()
    losses: list[float] = []
    text = SEVERAL.replace("LOOP", step).replace("@hpo.trial", "").replace("losses = []", "losses = LOSSES")
    seed_all(3)
    code["LOSSES"] = losses
    exec(text.replace("    run.folder", "    #"), code)
    code["train"](run)
    return losses, run.model.state_dict()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("step", [GAN, TOGETHER, NEWTON], ids=["gan", "together", "newton"])
def test_steps_of_several_optimizers_are_those_of_pytorch(tmp_path: Path, step: str, precision: str) -> None:
    norm = None if step == NEWTON else 1.0  # the two norms may differ in the last bit
    training = {"seed": 3, "max_grad_norm": norm}
    executor = own_executor(tmp_path, SEVERAL.replace("LOOP", step), training=training)
    result = run(executor, tmp_path / "trial", fp_precision=precision)
    if (step, precision) == (NEWTON, "fp16"):
        assert (result.outcome, "no steps with a closure" in result.reason) == ("incompatible", True)
        return
    assert result.outcome == "complete", result.reason
    assert result.telemetry["precision"]["agrees"], result.telemetry["precision"]
    losses, state = plain_steps(step, precision == "fp16", norm or float("inf"))
    assert (tmp_path / "trial" / "files" / "losses").read_text() == repr(losses)
    stored = weights_of(tmp_path / "trial")
    assert all(torch.equal(stored[f"model.{name}"], value) for name, value in state.items())


@pytest.mark.parametrize("optimizers", ["(first, first)", "[first, newton]", "[]", "(first, unused)"])
def test_optimizers_that_cannot_step_together(tmp_path: Path, optimizers: str) -> None:
    unused = "unused = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)"
    step = f"{unused}; amp.step(both, ROWS, {optimizers})"
    result = run(own_executor(tmp_path, SEVERAL.replace("LOOP", step)))
    assert (result.outcome, "amp.step: " in result.reason) == ("invalid", True), result.reason


ENDS_LATE = """
@hpo.trial
def train(run):
    model = net()
    amp = run.prepare(model, loss_of_batch, (ROWS, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    while run.step < 4:
        amp.step(loss_of_batch, (ROWS, CLASSES), optimizer)
        run.report({"accuracy": 0.5}, done=0.9 * run.step / 4)
    if not run.folder.joinpath("begun").exists():
        run.folder.joinpath("begun").touch()
        raise KeyboardInterrupt
    run.report({"accuracy": 0.7})
"""


def test_resume_without_a_step_keeps_the_observation(tmp_path: Path) -> None:
    executor = own_executor(tmp_path, ENDS_LATE)
    with pytest.raises(KeyboardInterrupt):
        run(executor, tmp_path / "trial", fp_precision="fp32")
    resumed = run(executor, tmp_path / "trial", fp_precision="fp32").telemetry
    assert (resumed["resumed_from_step"], resumed["precision"]["agrees"]) == (4, True)


@pytest.mark.parametrize("fallback", [False, True])
def test_loss_of_one_number_in_a_list(tmp_path: Path, fallback: bool) -> None:
    loop = changed("amp.step(loss_of_batch", "amp.step(lambda *of: loss_of_batch(*of)[None]")
    amp = {"allow_emulated": True, "fallback_to_fp32": fallback}
    loop = OVERFLOW.replace("== torch.float32", "== torch.float32 or len(rows) < 16") * fallback + loop
    assert run(own_executor(tmp_path, loop, amp=amp), fp_precision="bf16").outcome == "complete"


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
        (LOOP, {"fp_precision": "tf32"}, "unsupported", "tf32"),
        (changed("ROWS[rows], CL", "ROWS[rows] * torch.inf, CL"), {}, "nonfinite", "not finite in 3 steps"),
        (changed("        run.report(", "        print("), {}, "invalid", "returned without a report"),
        (changed('{"accuracy"', '{"recall"'), {}, "invalid", "evaluation. Give it to `run.report`"),
        (changed("        model.train()", "        1 / 0"), {}, "failed", "ZeroDivisionError"),
    ],
)
def test_outcomes(tmp_path: Path, loop: str, params: dict[str, Any], outcome: str, reason: str) -> None:
    result = run(own_executor(tmp_path, loop), tmp_path / "trial", **params)
    assert result.outcome == outcome, result.traceback
    assert reason in result.reason


STEP = "            amp.step(loss_of_batch, (ROWS[rows], CLASSES[rows]), optimizer)"


@pytest.mark.parametrize("step", [STEP.replace("],", "]*torch.inf,"), "run.report({'accuracy': torch.nan})"])
def test_function_cannot_swallow_the_end(tmp_path: Path, step: str) -> None:
    careless = f"{' ' * 12}try: {step.strip()}\n{' ' * 12}except Exception: pass"
    assert run(own_executor(tmp_path, changed(STEP, careless))).outcome in ("nonfinite", "invalid")


UNDEFINED = changed('{"accuracy": accuracy(model, amp)}', '{"accuracy": math.nan}')
NAN_WEIGHT = UNDEFINED.replace(
    "        run.report(", "        nn.init.constant_(model[0].weight, math.nan)\n        run.report("
)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("loop", "outcome"),
    [
        (UNDEFINED, "invalid"),
        (NAN_WEIGHT, "nonfinite"),
        # Nothing is known of the training.
        ("@hpo.trial\ndef train(run):\n    run.report({'accuracy': math.inf})", "nonfinite"),
    ],
)
def test_metric_that_is_not_finite(tmp_path: Path, loop: str, outcome: str, precision: str) -> None:
    result = run(own_executor(tmp_path, f"import math\n{loop}"), fp_precision=precision)
    assert (result.outcome, result.telemetry.get("finite_in_fp32")) == (outcome, None)
    assert "a reported metric must be finite" in result.reason


def test_nonfinite_step_is_repeated_in_fp32(tmp_path: Path) -> None:
    """The model works in the check. Its fault is in later batches."""
    loop = OVERFLOW.replace("== torch.float32", "== torch.float32 or len(rows) < 16") + LOOP
    result = run(own_executor(tmp_path, loop), fp_precision="bf16")
    assert (result.outcome, result.telemetry["finite_in_fp32"]) == ("nonfinite", True)
    amp = {"allow_emulated": True, "fallback_to_fp32": True}
    result = run(own_executor(tmp_path, loop, amp=amp), tmp_path / "fallen", fp_precision="bf16")
    assert (result.outcome, result.telemetry["fp32_fallbacks"]) == ("complete", 9)
    assert run(own_executor(tmp_path, loop), tmp_path / "fp32", fp_precision="fp32").outcome == "complete"
    assert_same_weights(tmp_path / "fallen", tmp_path / "fp32")


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = weights_of(one), weights_of(other)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize("stop_at", [4, 5])
def test_resume_is_exact(tmp_path: Path, stop_at: int) -> None:
    """It stops in the middle of a round, or between two, and draws from all generators."""
    draws = "random.random() + numpy.random.rand() + float(torch.rand(()))"
    loop = changed("        model.train()", f"        ROWS[0, 0] = {draws}\n        model.train()")
    executor = own_executor(tmp_path, f"import random, numpy\n{loop}")
    result = check_resume_is_exact(executor, tmp_path, stop_at, fp_precision="fp32", **RATE)
    assert result.telemetry["num_steps"] == 9


def test_pause_after_the_round_and_immediate_pruning(tmp_path: Path) -> None:
    note = tmp_path / "note"
    executor = own_executor(tmp_path, f"{LOOP.rstrip()}\n        open({str(note)!r}, 'w').close()\n")

    def run_to(end: type[Exception], index: int) -> TrialResult:
        def end_there(scored: Evaluation) -> None:
            if scored.index == index:
                raise end("told so")

        return executor.run(RATE, tmp_path / "paused", "trial", Callbacks(end_there))

    assert run_to(Paused, 1).outcome == "paused"
    note.unlink()  # the code behind the report ran
    resumed = run_to(Pruned, 2)
    assert (resumed.outcome, note.exists()) == ("pruned", False)
    assert (resumed.telemetry["resumed_from_step"], resumed.telemetry["num_steps"]) == (3, 6)


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
    for name, observe in (("seen", "run.observe(model)"), ("plain", "pass")):
        executor = own_executor(tmp_path / name, foreign("run.precision.name == 'bf16'", observe))
        result = run(executor, tmp_path / name / "trial", fp_precision=precision)
        assert result.outcome == "complete", result.traceback or result.reason
        found = result.telemetry["precision"]
        assert found["agrees"] is (True if name == "seen" else None)
        assert ("nothing was observed: call `run.prepare`" in found["observed_reason"]) == (name == "plain")
    assert_same_weights(tmp_path / "seen/trial", tmp_path / "plain/trial")


@pytest.mark.parametrize(
    ("precision", "enabled", "where"),
    [
        ("bf16", "False", r"bf16, but in training 2 of 2 weights .* bfloat16: 0.weight \(float32"),
        ("fp32", "True", "fp32, but in training"),
        ("fp32", "not model.training", "fp32, but in evaluation"),
    ],
)
def test_loop_in_another_precision_ends(tmp_path: Path, precision: str, enabled: str, where: str) -> None:
    result = run(own_executor(tmp_path, foreign(enabled)), fp_precision=precision)
    assert result.outcome == "invalid"
    assert re.search(where, result.reason), result.reason


UNMEASURED = """
class Changing(nn.Linear):
    def forward(self, rows):
        if self.training:
            return nn.functional.linear(rows, self.weight + rows.mean(0), self.bias)
        return super().forward(rows)

def net():
    return nn.Sequential(Changing(4, 2))
"""
PREPARE = "    amp = run.prepare("
COMPILE = "    model.compile(backend='eager')\n"
COPY_TRAINS = "= loss_of_batch(nn.Sequential(*model)"
PREPARED = "run.prepare(model, loss_of_batch, (ROWS, CLASSES))"


# PyTorch's compiler looks at the attribute where it traces the hook of the check.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("loop", "reason"),
    [
        (changed(PREPARE, COMPILE + PREPARE), "compiled"),
        (changed("    run.keep(", COMPILE + "    run.keep("), "compiled"),
        (UNMEASURED + foreign("False"), "could not be measured"),  # only in training
        (foreign("False", PREPARED), "make each step with `amp.step`"),
        (foreign("False", PREPARED).replace("run.count_step(48)", ""), "make each step with `amp.step`"),
        (foreign("False").replace("= loss_of_batch(model", COPY_TRAINS), "no training was observed"),
    ],
    ids=["compiled before", "compiled later", "unmeasured", "own steps", "uncounted steps", "a copy trains"],
)
def test_unseen_products_are_unverified(tmp_path: Path, loop: str, reason: str) -> None:
    result = run(own_executor(tmp_path, loop), fp_precision="fp32")
    assert result.outcome == "complete", result.traceback or result.reason
    assert result.telemetry["precision"]["agrees"] is None
    assert reason in result.telemetry["precision"]["observed_reason"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("torch.optim.AdamW", "torch.optim.AdamV", r"own\.py:\d+: AttributeError: .*AdamV"),
        ("(ROWS[:8]", "(ROWS[:8] * torch.nan", "cannot run in fp32: .*not finite in fp32"),
        ('run.params["width"]', 'run.params["depth"]', r"must fix `depth` .* search .*--param depth=VALUE"),
        ("    run.keep(", f"    {PREPARED}\n    run.keep(", "once"),
        ("optimizer=optimizer)", "optimizer=3)", "`optimizer` must have `state_dict`"),
        ("run.keep(model=model, ", "run.keep(", r"must hold the model of `run.prepare`"),
        ("net(run", "net(run.params['seed']).bfloat16() or (run", "all weights must be in torch.float32"),
    ],
)
def test_check_finds_mistakes_before_the_first_step(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        own_executor(tmp_path, changed(old, new)).check_study()
    own_executor(tmp_path / "sound", changed(STEP, f"            1 / 0\n{STEP}")).check_study()


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ("{}", "must be given a mapping"),
        ('{"peak_memory_bytes": 1}', "a name of its own"),
        ('{"accuracy": 1}, done=7', "must be above 0 and at most 1"),
    ],
)
def test_wrong_reports(tmp_path: Path, report: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(own_executor(tmp_path, changed('{"accuracy": accuracy(model, amp)}', report)))


COUNTED = """
import dataclasses

@dataclasses.dataclass
class Rows:
    rows: torch.Tensor
    classes: torch.Tensor

@hpo.trial
def train(run):
    model = net()
    batch = Rows(ROWS[:16], CLASSES[:16])
    of = lambda model, batch: loss_of_batch(model, (batch.rows, batch.classes))
    amp = run.prepare(model, of, batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in run.steps(3):
        amp.step(of, batch, optimizer)
        run.report({"accuracy": 1.0})
"""


@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
def test_batch_in_a_dataclass(tmp_path: Path, precision: str) -> None:
    result = run(own_executor(tmp_path, COUNTED), fp_precision=precision)
    assert (result.outcome, result.telemetry["num_examples"]) == ("complete", 48), result.reason


def test_examples_of_a_batch_with_several_lengths_are_unknown(tmp_path: Path) -> None:
    field = "    classes: torch.Tensor"
    several = COUNTED.replace(field, field + "\n    other: torch.Tensor = ROWS")
    result = run(own_executor(tmp_path, several), tmp_path / "trial", fp_precision="fp32")
    assert result.outcome == "complete", result.reason
    assert result.telemetry["num_examples"] is None
    assert result.telemetry["throughput"]["train_examples_per_second"] is None
    assert result.telemetry["num_steps"] == 3


NUMPY = """
import numpy as np

@hpo.trial
def train(run):
    model, generator = net(), np.random.default_rng(1)
    def of(model, batch):
        share = np.random.rand() + generator.random()
        return loss_of_batch(model, (batch[0] * share, batch[1]))
    before = np.random.get_state()[2], generator.bit_generator.state
    batch = ROWS[:16], CLASSES[:16]
    amp = run.prepare(model, of, batch)
    assert before == (np.random.get_state()[2], generator.bit_generator.state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in run.steps(3):
        amp.step(of, batch, optimizer)
        run.report({"accuracy": 1.0})
"""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_check_leaves_all_generators(tmp_path: Path, precision: str) -> None:
    result = run(own_executor(tmp_path, NUMPY), fp_precision=precision)
    assert result.outcome == "complete", result.reason
    assert result.telemetry["compatibility"]["verdict"] == "ok"


NORMED = """
class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.types, self.first, self.norm = nn.Embedding(2, 8), nn.Linear(8, 8), nn.LayerNorm(8)
    def forward(self, ids):
        return self.norm(self.first(self.types(ids)))

class Keeping(torch.optim.SGD):
    def step(self, closure=None):
        torch.save([one.grad.float() for one in self.param_groups[0]["params"]], FILE)

def loss_of_normed(model, ids):
    wanted = 1 + torch.randn(8, generator=torch.Generator().manual_seed(1))
    return (model(ids).float() * wanted).sum()

@hpo.trial
def train(run):
    model, ids = Normed(), torch.arange(4000) % 2
    amp = run.prepare(model, loss_of_normed, ids[:4])
    run.keep(model=model)
    for _ in run.steps(1):
        amp.step(loss_of_normed, ids, Keeping(model.parameters(), lr=0.0))
        run.report({"accuracy": 0.5})
"""


def test_gradients_of_norms_and_embeddings_are_those_of_fp32(tmp_path: Path) -> None:
    found = {}
    for precision in ("fp32", "bf16", "bf16-true"):
        file = tmp_path / precision
        code = f"FILE = {str(file)!r}\n{NORMED}"
        executor = own_executor(tmp_path, code, training={"seed": 3, "max_grad_norm": None})
        assert run(executor, fp_precision=precision).outcome == "complete"
        found[precision] = torch.load(file)
    exact = found.pop("fp32")
    for gradients in found.values():
        for one, other in zip(gradients, exact, strict=True):
            assert (one - other).norm() < 0.05 * other.norm()


CHANGES_LATER = {
    "cast after prepare": ("    optimizer =", "    model.bfloat16()\n    optimizer ="),
    "another loss": ("amp.step(loss_of_batch", "amp.step(loss_in_fp32"),
    "own evaluation": ("with amp.evaluation()", "with torch.no_grad()"),
}
LOSS_IN_FP32 = """
def loss_in_fp32(model, batch):
    with torch.autocast("cpu", enabled=False):
        return loss_of_batch(model, batch)

def accuracy(model, amp):
    with amp.evaluation():
        return (model.eval()(amp.inputs(ROWS)).argmax(1) == CLASSES).float().mean()
"""


@pytest.mark.parametrize(
    ("change", "precision"),
    [("cast after prepare", "fp32"), ("another loss", "bf16"), ("own evaluation", "bf16")],
)
def test_real_steps_and_evaluations_are_observed(tmp_path: Path, change: str, precision: str) -> None:
    old, new = CHANGES_LATER[change]
    loop = (LOSS_IN_FP32 + LOOP).replace(old, new)
    if change == "cast after prepare":
        loop = loop.replace("(ROWS[rows]", "(ROWS[rows].bfloat16()")
    result = run(own_executor(tmp_path, loop), fp_precision=precision)
    assert result.outcome == "complete", result.traceback or result.reason
    found = result.telemetry["precision"]
    assert found["agrees"] is False
    assert "2 of 2 weights were not multiplied" in found["observed_reason"]


LAYERS = "= loss_of_batch(model if step == 0 else nn.Sequential(*model)"


def test_steps_without_a_call_of_the_model_are_unverified(tmp_path: Path) -> None:
    loop = foreign("False").replace("= loss_of_batch(model", LAYERS)
    found = run(own_executor(tmp_path, loop), fp_precision="fp32").telemetry["precision"]
    assert found["agrees"] is None
    assert "was not called in training between two reports" in found["observed_reason"]


SWITCH = "        torch.backends.mkldnn.matmul.fp32_precision = 'bf16'\n        run.report("


def test_a_switch_after_the_observation_is_unverified(tmp_path: Path) -> None:
    result = run(own_executor(tmp_path, changed("        run.report(", SWITCH)), fp_precision="fp32")
    found = result.telemetry["precision"]
    assert found["agrees"] is None
    assert "fp32 matmul on cpu (ieee, then bf16)" in found["observed_reason"]
