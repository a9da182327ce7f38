"""CUDA graphs of a trial. Here a stand-in runs the pass again at each replay; `tests/gpu` has real graphs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from support.tiny import CPU, TASKS, amp_of, tiny_batch, tiny_model, tiny_objective
from torch import Tensor, nn

import hpo.training.step_graphs
from hpo.data.batches import Batch
from hpo.models.multitask import MultitaskModel
from hpo.training import loop
from hpo.training.budget import TrainState
from hpo.training.loop import Learner, accumulate_gradients
from hpo.training.step_graphs import StepGraphs, _captured, _Recording

NUM_STEPS = 4


class StandIn:
    """A graph with normal passes on the recorded tensors and gradients."""

    def __init__(self, graphs: Graphs, batch: Batch, items: Any, share: Tensor) -> None:
        self.graphs, self.arguments = graphs, (batch, items, share)
        before = [parameter.grad for parameter in graphs._trainable]
        for parameter in graphs._trainable:
            parameter.grad = None
        self.loss = graphs._passes(*self.arguments)
        self.parameters = [one for one in graphs._trainable if one.grad is not None]
        self.addresses = [graphs._gradients[one] for one in self.parameters]
        for parameter, gradient in zip(graphs._trainable, before, strict=True):
            parameter.grad = gradient

    def replay(self) -> None:
        given = [parameter.grad for parameter in self.parameters]
        assert all(one is address for one, address in zip(given, self.addresses, strict=True))
        self.loss.copy_(self.graphs._passes(*self.arguments))
        self.graphs.num_replays += 1
        if self.graphs.is_wrong:
            self.addresses[0].add_(1.0)


class Graphs(StepGraphs):
    num_replays = 0
    is_wrong = False
    error: Exception | None = None

    def _try_to_record(self, batch: Batch, num_items: Mapping[str, int]) -> Any:
        if self.error:
            raise self.error
        self._fix_gradients(self._trainable)
        names = [name for name, count in num_items.items() if count]
        fixed, numbers = batch.map(torch.clone), torch.ones(1 + len(names))
        share, *counts = numbers.unbind()
        items = {**dict.fromkeys(num_items, 0), **dict(zip(names, counts, strict=True))}
        state = torch.get_rng_state()
        graph: Any = StandIn(self, fixed, items, share)
        torch.set_rng_state(state)
        return _Recording(graph, fixed, numbers, graph.loss, graph.parameters)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, getattr(torch, name))
    monkeypatch.setattr(Tensor, "pin_memory", lambda values: values)
    monkeypatch.setattr(hpo.training.step_graphs, "_recording_stream", lambda _: None)
    monkeypatch.setattr(hpo.training.step_graphs, "MIN_LAUNCH_RATIO", 1e-9)


def uncertain_learner(name: str = "bf16") -> Learner:
    """Return a learner with dropout and learned uncertainty."""
    model, loss_fn = tiny_model(), tiny_objective()
    for head in model.heads:
        head[0].p = 0.2
    model.log_variances.extend(nn.Parameter(torch.tensor(0.3)) for _ in TASKS)
    loss_fn.log_variance = model.log_variance
    return Learner(model.train(), loss_fn, amp_of(name))


def with_graphs(name: str = "bf16") -> tuple[Learner, Graphs]:
    learner = uncertain_learner(name)
    return learner, Graphs(learner.model, partial(loop.forward_backward, learner), CPU)


def run_steps(learner: Learner, graphs: Graphs | None, micro_batch_size: int = 4) -> list[list[Tensor]]:
    """Loss and gradients of steps. Batches have two shapes, and the last one has no label of one task."""
    state, found = TrainState(micro_batch_size=micro_batch_size), []
    for step in range(3 * NUM_STEPS):
        batch = tiny_batch(6, length=8 + 2 * (step % 2), seed=step)
        if step == 3 * NUM_STEPS - 1:
            batch.targets["size"].fill_(math.nan)
        loss = accumulate_gradients(learner, batch, 0, state, graphs=graphs)
        gradients = [one.grad for one in learner.model.parameters() if one.grad is not None]
        found.append([loss.clone(), *(one.clone() for one in gradients)])
        state.step += 1
    return found


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_replays_equal_passes(name: str) -> None:
    expected, (learner, graphs) = run_steps(uncertain_learner(name), None), with_graphs(name)
    found = run_steps(learner, graphs)
    assert graphs.num_replays > NUM_STEPS
    assert graphs.num_recorded >= 4, "two lengths, and a smaller last micro-batch of each"
    assert not graphs.problem
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, equal_nan=True)


def test_wrong_replay_ends_the_graphs() -> None:
    learner, graphs = with_graphs()
    graphs.is_wrong = True
    found = run_steps(learner, graphs)
    assert graphs.num_replays == 1
    assert graphs.problem.startswith("a replayed step differs from the step: ")
    torch.testing.assert_close(found, run_steps(uncertain_learner(), None))


@pytest.mark.parametrize("error", [RuntimeError("it synchronizes"), torch.OutOfMemoryError("full.")])
def test_pass_without_a_recording(error: Exception) -> None:
    learner, graphs = with_graphs()
    graphs.error = error
    found = run_steps(learner, graphs)
    assert graphs.problem == f"a step cannot be recorded: {error}"
    assert not graphs.release(), "there is nothing left to give up"
    torch.testing.assert_close(found, run_steps(uncertain_learner(), None))


def test_slow_kernels_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hpo.training.step_graphs, "MIN_LAUNCH_RATIO", 1e9)
    learner, graphs = with_graphs()
    run_steps(learner, graphs)
    assert (graphs.num_recorded, graphs.problem) == (0, "")
    assert graphs.take_tried(), "the steps of dropped recordings have no rate"
    assert not graphs.take_tried()


def test_out_of_memory_releases_graphs_first(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, graphs = with_graphs()
    run_steps(learner, graphs)
    forward, refused = MultitaskModel.forward, list[int]()

    def forward_when_free(model: MultitaskModel, *inputs: Any) -> Any:
        if graphs._recordings:
            refused.append(len(inputs[0]))
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(model, *inputs)

    monkeypatch.setattr(MultitaskModel, "forward", forward_when_free)
    state = TrainState(micro_batch_size=4)
    accumulate_gradients(learner, tiny_batch(6, length=20), 0, state, graphs=graphs)
    assert refused == [4]
    assert (state.micro_batch_size, state.oom_halvings) == (4, 0)
    assert graphs.problem == "no memory was left for CUDA graphs."


@pytest.mark.parametrize("fails", ["begin", "end", "block"])
def test_a_failed_capture_resets_generator_and_allocator(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator, graph, allocator, error = Mock(), Mock(), Mock(), torch.OutOfMemoryError(fails)
    monkeypatch.setattr(torch.cuda, "default_generators", [Mock(), generator])
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", allocator, raising=False)
    getattr(graph, f"capture_{fails}").side_effect = error
    body = Mock(side_effect=KeyError if fails == "block" else None)
    with pytest.raises(KeyError if fails == "block" else RuntimeError) as raised, _captured(graph, (0, 7), 1):
        body()
    assert not isinstance(raised.value, torch.OutOfMemoryError), "this would be tried again beside old graphs"
    spoiled = fails != "block"
    assert generator.graphsafe_set_state.call_args_list == [call(generator.clone_state())] * spoiled
    assert allocator.call_args_list == [call(1, (0, 7))] * spoiled
