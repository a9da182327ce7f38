import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from support.command_line import hpo_command, ok
from support.every_kind import TASKS, WINDOWS, every_kind_executor, write_every_kind
from support.resumed_trials import check_resume_is_exact, run_trial, weights_of
from support.tiny import parts_of, tiny_executor
from support.tiny_encoders import BERT, DECODERS, FAMILIES, save_encoder
from transformers import AutoModel

import hpo
from hpo.errors import ModelError, RunError
from hpo.inference.model import TrainedModel
from hpo.models.adapters import AdapterSettings, add_adapter, merge_adapter, trained_state
from hpo.models.encoder import load_encoder
from hpo.outcome import Outcome
from hpo.trial.best_model import export_checkpoint
from hpo.trial.executor import Executor
from hpo.trial.telemetry import StoredTrial

ENCODERS = {**{name: config for name, (config, _) in FAMILIES.items()}, **DECODERS}
BASES = ["fp32", "bf16", "int8", "nf4"]
LORA: dict[str, Any] = {"adapter": "lora", "lora_rank": 4, "lora_learning_rate": 1e-2}
TEXTS = ["late again the parcel came to Rome", "broken !"]


def executor_of(folder: Path, encoder: Any = BERT, **training: Any) -> Executor:
    """Return the executor of a study with every kind of task."""
    training = {**WINDOWS, "max_steps": 12, **LORA, **training}
    changes: dict[str, Any] = {"training": training, "amp": {"allow_emulated": True}, "search_space": {}}
    return every_kind_executor(folder, model={"encoder": encoder}, **changes)


def trained_on(folder: Path, encoder: Any = BERT, **training: Any) -> Executor:
    """Train a trial, and leave its checkpoint in `folder / "trial"`."""
    executor = executor_of(folder, encoder, **training)
    result = run_trial(executor, folder / "trial")
    assert result.outcome == Outcome.COMPLETE, result.reason
    return executor


def exported(executor: Executor, folder: Path, name: str, *, merge: bool = False) -> Path:
    return export_checkpoint(executor, folder / "trial", folder / name, StoredTrial(0), merge=merge)


def largest_error(one: TrainedModel, other: TrainedModel) -> float:
    logits = []
    for model in (one, other):
        inputs = model.tokenizer(TEXTS, return_tensors="pt", padding=True)
        with torch.no_grad():
            logits.append(model(inputs["input_ids"], inputs["attention_mask"]).logits)
    assert logits[0].keys() == logits[1].keys() == TASKS.keys()
    return max(float((ours - logits[1][name]).norm() / ours.norm()) for name, ours in logits[0].items())


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("adapter", ["lora", pytest.param("dora", marks=pytest.mark.slow)])
def test_trial_resumes_bit_for_bit_from_trained_weights(tmp_path: Path, adapter: str, base: str) -> None:
    executor = executor_of(tmp_path, adapter=adapter, base_precision=base, lora_dropout=0.1)
    check_resume_is_exact(executor, tmp_path)
    weights = weights_of(tmp_path / "whole")
    assert all(".lora_" in name for name in weights if name.startswith("encoder.")), "no frozen weight"
    norms = [float(value.norm()) for name, value in weights.items() if ".lora_B" in name]
    assert (len(norms), min(norms) > 0) == (12, True), "every linear layer but the pooler has an adapter"


@pytest.mark.parametrize("encoder", ENCODERS)
def test_default_targets_fit_every_encoder(tmp_path: Path, encoder: str) -> None:
    attention = FAMILIES[encoder][1] if encoder in FAMILIES else "sdpa"
    settings = {"gradient_checkpointing": encoder != "mpnet", "max_steps": 2}
    settings |= {"base_precision": "int8", "fp_precision": "bf16"}
    result = run_trial(executor_of(tmp_path, ENCODERS[encoder], **settings), tmp_path / "trial")
    assert result.outcome == Outcome.COMPLETE, result.reason
    assert result.telemetry["attention"] == {"requested": None, "effective": attention}
    for name in ("precision", "base_precision"):
        assert result.telemetry[name]["agrees"], result.telemetry[name]


def test_relative_positions_over_an_int8_base_compute_in_fp32(tmp_path: Path) -> None:
    settings = {"attention": "eager", "base_precision": "int8", "fp_precision": "fp32", "max_steps": 2}
    result = run_trial(executor_of(tmp_path, ENCODERS["deberta-v2"], **settings), tmp_path / "trial")
    assert result.outcome == Outcome.COMPLETE, result.reason
    assert result.telemetry["precision"]["agrees"], result.telemetry["precision"]


@pytest.mark.parametrize(
    ("precision", "base", "adapter"),
    [
        *(("fp32", base, "lora") for base in BASES),
        ("fp32", "int8", "dora"),
        ("bf16", "int8", "lora"),
        ("bf16-true", "nf4", "dora"),
    ],
)
def test_merged_model_predicts_the_same(tmp_path: Path, precision: str, base: str, adapter: str) -> None:
    """In fp32 up to rounding, whatever the base is; in bf16 the merged weights are rounded again."""
    executor = trained_on(tmp_path, adapter=adapter, base_precision=base, fp_precision=precision)
    exported(executor, tmp_path, "alone")
    exported(executor, tmp_path, "merged", merge=True)
    alone, merged = (hpo.load(tmp_path / name) for name in ("alone", "merged"))
    assert largest_error(alone, merged) < (2e-6 if precision == "fp32" else 2e-2)
    assert not any(".lora_" in name for name in load_file(tmp_path / "merged" / "model.safetensors"))
    assert type(AutoModel.from_pretrained(tmp_path / "merged")).__name__ == "BertModel"


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
def test_merged_experts_are_a_plain_model() -> None:
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    sizes |= {"q_lora_rank": 8, "kv_lora_rank": 8, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
    model: Any = torch.nn.Module()
    model.encoder = load_encoder({**DECODERS["llama"], "model_type": "deepseek_v3", **sizes})
    names = [*model.state_dict()]
    add_adapter(model.encoder, AdapterSettings(adapter="lora"))
    merge_adapter(model)
    assert [*model.state_dict()] == names


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize(("encoder", "adapter"), [("bert", "dora"), ("qwen3", "lora")])
def test_peft_loads_an_export(tmp_path: Path, encoder: str, adapter: str) -> None:
    executor = trained_on(tmp_path, ENCODERS[encoder], adapter=adapter)
    folder = exported(executor, tmp_path, "alone")
    with_peft = PeftModel.from_pretrained(AutoModel.from_pretrained(folder / "base"), str(folder)).eval()
    inputs = {"input_ids": torch.arange(1, 13)[None], "attention_mask": torch.ones(1, 12, dtype=torch.long)}
    ours: Any = hpo.load(folder).network.encoder
    with torch.no_grad():
        encoders = (ours, with_peft, AutoModel.from_pretrained(folder / "base"))
        states, expected, bare = (encoder(**inputs).last_hidden_state for encoder in encoders)
    assert torch.allclose(states, expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(states, bare, rtol=1e-2, atol=1e-3), "the adapter changes states"


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_encoder_with_an_adapter_beside_it_is_refused(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "encoder")
    with_peft = get_peft_model(AutoModel.from_pretrained(folder), LoraConfig(target_modules=["query"]))
    with_peft.save_pretrained(str(folder))
    with pytest.raises(ModelError, match=r"its folder has one \(adapter_config.json\). Merge it"):
        load_encoder(str(folder))


def test_adapter_belongs_to_its_frozen_weights(tmp_path: Path) -> None:
    """Other weights under the same name are noticed by a resume, an export and a load."""
    encoder = save_encoder(tmp_path / "encoder")
    executor = executor_of(tmp_path, str(encoder))
    assert run_trial(executor, tmp_path / "trial", stop_at=9).outcome == Outcome.PREEMPTED
    weights = load_file(encoder / "model.safetensors")
    name = "encoder.layer.1.output.dense.weight"
    save_file({**weights, name: weights[name] + 1e-3}, encoder / "model.safetensors", {"format": "pt"})
    assert "resumed_from_step" not in run_trial(executor, tmp_path / "trial").telemetry
    folder = exported(executor, tmp_path, "alone")
    save_file(weights, encoder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RunError, match=r"must have the weights that the trial's adapter .* was trained on"):
        exported(executor, tmp_path, "again")
    assert hpo.load(folder).predict(TEXTS), "it has its own copy"
    save_file(weights, folder / "base" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"base/model\.safetensors has changed since"):
        hpo.load(folder)
    content = json.loads((folder / "hpo.json").read_text())
    (folder / "hpo.json").write_text(json.dumps(content | {"checksums": {}}))
    with pytest.raises(ModelError, match="other weights than the adapter was trained on"):
        hpo.load(folder)


def test_frozen_weights_are_recorded(tmp_path: Path) -> None:
    sizes, errors = [], []
    for base, bits in zip(BASES, (32.0, 16.0, 8.0, 4.5), strict=True):
        result = run_trial(executor_of(tmp_path, base_precision=base, max_steps=1), tmp_path / base)
        facts = result.telemetry["base_precision"]
        assert (facts["requested"], facts["effective"], facts["agrees"]) == (base, base, True)
        assert bits <= facts["observed"]["bits_per_weight"] < bits + 1  # with a scale for each row
        sizes.append(facts["observed"]["weights_bytes"])
        assert result.telemetry["precision"]["observed"]["linear_products"] == {"float32": 44}
        errors.append(max(result.telemetry["compatibility"]["logits_relative_error"].values()))
    assert sizes == sorted(sizes, reverse=True)
    assert errors[0] == 0, "the check measures the error of the base"
    assert 1e-4 < max(errors[1:3]) < errors[3] < 0.1
    result = run_trial(executor_of(tmp_path, fp_precision="bf16-true", max_steps=1), tmp_path / "true")
    facts = result.telemetry["base_precision"]
    reason = "bf16-true has all weights in bf16."
    assert (facts["requested"], facts["effective"], facts["reason"]) == ("fp32", "bf16", reason)


def test_base_of_experts_disagrees(tmp_path: Path) -> None:
    mixtral = {**DECODERS["llama"], "model_type": "mixtral", "num_local_experts": 2}
    result = run_trial(executor_of(tmp_path, mixtral, base_precision="int8", max_steps=1), tmp_path / "moe")
    facts = result.telemetry["base_precision"]
    assert (facts["effective"], facts["agrees"]) == ("int8", False)
    assert "experts" in facts["reason"]
    assert facts["observed"]["bits_per_weight"] > 16


def test_targets_and_their_learning_rate(tmp_path: Path) -> None:
    targets = {"lora_targets": ["query", "1.output.dense"], "lora_learning_rate": 3e-3}
    parts = parts_of(executor_of(tmp_path, learning_rate=1e-4, **targets), fp_precision="fp32")
    rates = {group["name"]: group["lr"] for group in parts.prepare().param_groups}
    assert rates == {"encoder": 3e-3, "heads": 1e-4, "heads, no decay": 1e-4}
    names = [name for name in trained_state(parts.model) if ".lora_A" in name]
    ends = ["0.attention.self.query", "1.attention.self.query", "1.output.dense"]
    assert names == [f"encoder.encoder.layer.{end}.lora_A.default.weight" for end in ends]


def test_unknown_target_is_refused_before_the_study(tmp_path: Path) -> None:
    message = r"lora_targets: `qeury` must end the name of a linear layer of this BertModel: .*`query`\?"
    with pytest.raises(ModelError, match=message):
        executor_of(tmp_path, lora_targets=["value", "qeury"]).check_study()
    space = {"adapter": {"type": "categorical", "choices": ["none", "lora"]}}
    executor = tiny_executor(tmp_path, search_space=space, training={"lora_targets": ["pooler.dense"]})
    with pytest.raises(ModelError, match=r"lora_targets: `pooler.dense` must end"):
        executor.check_study()


GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("adapter", ["lora", "dora"])
def test_layers_of_gpt2_are_adapted_as_by_peft(tmp_path: Path, adapter: str) -> None:
    """GPT-2's layers are Conv1D. The reference is peft's own model over the exported adapter."""
    executor = trained_on(tmp_path, GPT2, adapter=adapter, pooling="last", fp_precision="fp32")
    alone = hpo.load(exported(executor, tmp_path, "alone"))
    base = AutoModel.from_pretrained(tmp_path / "alone" / "base")
    theirs = PeftModel.from_pretrained(base, tmp_path / "alone").eval()
    inputs = alone.tokenizer(TEXTS[:1], return_tensors="pt")
    with torch.no_grad():
        ours = alone.network.encoder(**inputs).last_hidden_state
        assert torch.equal(ours, theirs(**inputs).last_hidden_state)
    merged = hpo.load(exported(executor, tmp_path, "merged", merge=True))
    assert 0 < largest_error(alone, merged) < 2e-6
    assert any(".c_attn.lora_B" in name for name in weights_of(tmp_path / "trial"))


@pytest.mark.parametrize(
    ("encoder", "training", "message"),
    [
        (GPT2, {"base_precision": "int8"}, "`int8` needs frozen layers of `torch.nn.Linear`, but GPT2Model"),
        (
            {**BERT, "model_type": "squeezebert", "embedding_size": 32},
            {},
            "must have linear layers to adapt, but this Squeeze",
        ),
    ],
)
def test_encoder_without_linear_layers_is_refused(
    tmp_path: Path, encoder: Any, training: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        run_trial(executor_of(tmp_path, encoder, pooling="last", **training), tmp_path / "trial")


def test_searched_adapter_is_merged_by_the_command(tmp_path: Path) -> None:
    space = {"adapter": {"type": "categorical", "choices": ["lora", "dora"]}}
    training = {**WINDOWS, "max_steps": 8, "lora_targets": ["q_proj"], "base_precision": "int8"}
    model = {"encoder": DECODERS["qwen3"]}
    path = write_every_kind(tmp_path, model=model, training=training, search_space=space, n_trials=1)
    ran = ok(hpo_command(tmp_path, "run", path.name))
    assert "In this Qwen3Model a token sees only the text before it" in ran.err
    refused = hpo_command(tmp_path, "best", path.name, "--merge")
    assert (refused.exit_code, "give --export DIR, too" in refused.err) == (2, True)
    ok(hpo_command(tmp_path, "best", path.name, "--export", "merged", "--merge"))
    assert hpo.load(tmp_path / "merged").predict(TEXTS)
