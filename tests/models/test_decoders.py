from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.every_kind import WINDOWS, write_every_kind
from support.resumed_trials import check_resume_is_exact
from support.tiny import CPU, TinyEncoder
from support.tiny_encoders import BERT, DECODERS, FAMILIES, KIND_TASKS, LABEL, family_encoder, make_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast

import hpo
from hpo.config.resolved_study import resolve_study
from hpo.config.study_config import load_study
from hpo.deploy.onnx_fp32 import export_onnx
from hpo.errors import ModelError
from hpo.inference.model import TrainedModel
from hpo.models.build import build_model
from hpo.models.encoder import check_token_ids, is_causal, load_encoder, load_tokenizer
from hpo.models.export import ExportSettings
from hpo.models.multitask import HeadSettings, pool_last
from hpo.precision.amp import prepare_model
from hpo.precision.table import PRECISIONS
from hpo.tasks.tokenized_split import Windowing
from hpo.trial.executor import Executor

IDS_L = torch.arange(1, 13)


@pytest.mark.parametrize("name", DECODERS)
def test_decoder_is_causal_and_caches_no_keys(name: str) -> None:
    decoder: Any = load_encoder(DECODERS[name])
    assert is_causal(decoder)
    assert not decoder.training
    with torch.no_grad():
        output = decoder(input_ids=IDS_L[None], attention_mask=torch.ones(1, 12))
    assert output.past_key_values is None


def test_causality_is_measured() -> None:
    assert is_causal(load_encoder({**BERT, "is_decoder": True}))
    assert not any(is_causal(family_encoder(family)) for family in FAMILIES)
    assert not is_causal(TinyEncoder()), "its tokens see only themselves"


def test_last_pooling_ignores_padding_on_both_sides() -> None:
    model = make_model(DECODERS["llama"], pooling="last").eval()
    ids_BL = IDS_L[None]
    with torch.no_grad():
        expected = model(ids_BL, torch.ones_like(ids_BL))[LABEL.name]
        for widths in ((0, 4), (4, 0)):
            ids, mask = (torch.nn.functional.pad(one, widths) for one in (ids_BL, torch.ones_like(ids_BL)))
            torch.testing.assert_close(model(ids, mask)[LABEL.name], expected, rtol=1e-4, atol=1e-6)
    hidden_BLD = torch.arange(24.0).view(2, 4, 3)
    mask_BL = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    assert torch.equal(pool_last(hidden_BLD, mask_BL), hidden_BLD[[0, 1], [1, 3]])
    assert torch.equal(pool_last(hidden_BLD, mask_BL.flip(1)), hidden_BLD[[0, 1], [3, 3]])


def test_cls_pooling_of_a_decoder_is_refused() -> None:
    with pytest.raises(ModelError, match=r"`cls` is the state of the first token.* Use last or mean"):
        make_model(DECODERS["qwen3"], pooling="cls")


@pytest.mark.parametrize("name", DECODERS)
def test_rotary_frequencies_stay_in_fp32_under_bf16_weights(name: str) -> None:
    model = prepare_model(make_model(DECODERS[name], tasks=KIND_TASKS), PRECISIONS["bf16-true"])
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    dtypes = {buffer.dtype for name, buffer in model.named_buffers() if "inv_freq" in name}
    assert dtypes == {torch.float32}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", DECODERS)
def test_every_kind_of_task_trains_and_resumes_bit_for_bit(tmp_path: Path, name: str, precision: str) -> None:
    training = {**WINDOWS, "max_steps": 8, "gradient_checkpointing": True, "pooling": "last"}
    changes: dict[str, Any] = {"training": training, "amp": {"allow_emulated": True}}
    path = write_every_kind(tmp_path, model={"encoder": DECODERS[name]}, search_space={}, **changes)
    executor = Executor(resolve_study(load_study(path), CPU), tmp_path / "runs")
    result = check_resume_is_exact(executor, tmp_path, fp_precision=precision)
    assert result.telemetry["precision"]["agrees"], result.telemetry["precision"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_tied_checkpoint_in_16_bits_loads_in_fp32(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Published checkpoints have the head of a language model, tied to the embeddings."""
    settings = {key: value for key, value in DECODERS[name].items() if key != "model_type"}
    config = AutoConfig.for_model(DECODERS[name]["model_type"], **settings, tie_word_embeddings=True)
    language_model = AutoModelForCausalLM.from_config(config).to(dtype)
    assert language_model.lm_head.weight is language_model.get_input_embeddings().weight
    language_model.save_pretrained(tmp_path)
    load_tokenizer(DECODERS[name]).save_pretrained(tmp_path)
    encoder = load_encoder(str(tmp_path))
    stored = load_file(tmp_path / "model.safetensors")
    for key, value in encoder.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, stored[f"model.{key}"].float()), key
    assert {buffer.dtype for buffer in encoder.buffers() if buffer.is_floating_point()} == {torch.float32}


def test_decoder_without_special_tokens_predicts_and_exports(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    words = ["late", "again", "fine", "the", "parcel", "?"]
    vocabulary = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="?"))
    vocabulary.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary)
    none = {"vocab_size": len(words), "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    settings = {key: value for key, value in DECODERS["llama"].items() if key != "model_type"} | none
    torch.manual_seed(0)
    encoder = AutoModel.from_config(AutoConfig.for_model("llama", **settings))
    encoder.save_pretrained(tmp_path / "decoder")
    tokenizer.save_pretrained(tmp_path / "decoder")
    encoder = load_encoder(str(tmp_path / "decoder"))
    check_token_ids(encoder, load_tokenizer(str(tmp_path / "decoder")))
    network = build_model(encoder, (LABEL,), HeadSettings(pooling="last"), max_length=16).eval()
    export = ExportSettings(windowing=Windowing(16), attention="sdpa", precision="fp32")
    model = TrainedModel(network, tokenizer, export)
    assert model.tokenizer.pad_token is None
    onnx = hpo.load(export_onnx(model, tmp_path / "onnx"), device="cpu")
    texts = ["the parcel again late", "fine", "late", "the parcel fine"]
    together, alone, by_onnx = (
        [list(one[LABEL.name].scores.values()) for one in predictions]
        for predictions in (
            model.predict(texts),
            [model.predict([text])[0] for text in texts],
            onnx.predict(texts),
        )
    )
    for ours, single, graph in zip(together, alone, by_onnx, strict=True):
        assert ours == pytest.approx(single, abs=1e-5)
        assert ours == pytest.approx(graph, abs=1e-5)


def test_check_warns_of_a_decoder_for_tasks_of_tokens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_every_kind(tmp_path, model={"encoder": DECODERS["qwen3"]}, search_space={})
    executor = Executor(resolve_study(load_study(path), CPU), tmp_path / "runs")
    executor.check_study()
    assert "sees only the text before it, but reason, places, evidence, name may need" in caplog.text
    assert "The first token, where `no answer` is marked, knows nothing of the text." in caplog.text
    caplog.clear()
    executor.loader.tasks = tuple(task for task in executor.tasks if task.name == "places")
    executor.check_study()
    assert caplog.messages[-1].endswith("but places may need the text after it.")
