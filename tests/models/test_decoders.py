from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.every_kind import WINDOWS, every_kind_executor
from support.resumed_trials import check_resume_is_exact
from support.tiny import TinyEncoder
from support.tiny_encoders import BERT, DECODERS, FAMILIES, KIND_TASKS, LABEL, family_encoder, make_model
from transformers import AutoConfig, AutoModelForCausalLM

from hpo.errors import ModelError
from hpo.models.encoder import is_causal, load_encoder, load_tokenizer
from hpo.models.multitask import pool_last
from hpo.precision.amp import prepare_model
from hpo.precision.table import PRECISIONS

IDS_L = torch.arange(1, 13)


@pytest.mark.parametrize("name", DECODERS)
def test_decoder_is_causal_and_caches_no_keys(name: str) -> None:
    decoder: Any = load_encoder(DECODERS[name])
    assert (is_causal(decoder), decoder.training) == (True, False)
    with torch.no_grad():
        output = decoder(input_ids=IDS_L[None], attention_mask=torch.ones(1, 12))
    assert output.past_key_values is None
    with pytest.raises(ModelError, match=r"`cls` is the state of the first token.* Use last or mean"):
        make_model(DECODERS[name], pooling="cls")


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


@pytest.mark.parametrize("name", DECODERS)
def test_rotary_frequencies_stay_in_fp32_under_bf16_weights(name: str) -> None:
    model = prepare_model(make_model(DECODERS[name], tasks=KIND_TASKS), PRECISIONS["bf16-true"])
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    dtypes = {buffer.dtype for name, buffer in model.named_buffers() if "inv_freq" in name}
    assert dtypes == {torch.float32}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", DECODERS)
def test_every_kind_of_task_resumes(tmp_path: Path, name: str, precision: str, caplog: Any) -> None:
    training = {**WINDOWS, "max_steps": 8, "gradient_checkpointing": True, "pooling": "last"}
    study: dict[str, Any] = {"model": {"encoder": DECODERS[name]}, "amp": {"allow_emulated": True}}
    executor = every_kind_executor(tmp_path, training=training, search_space={}, **study)
    executor.check_study()
    assert "sees only the text before it, but reason, places, evidence, name may need" in caplog.text
    assert "The first token, where `no answer` is marked, knows nothing of the text." in caplog.text
    result = check_resume_is_exact(executor, tmp_path, fp_precision=precision)
    assert result.telemetry["precision"]["agrees"], result.telemetry["precision"]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_tied_checkpoint_in_16_bits_loads_in_fp32(tmp_path: Path, name: str) -> None:
    """Published checkpoints have the head of a language model, tied to the embeddings."""
    settings = {key: value for key, value in DECODERS[name].items() if key != "model_type"}
    config = AutoConfig.for_model(DECODERS[name]["model_type"], **settings, tie_word_embeddings=True)
    language_model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    assert language_model.lm_head.weight is language_model.get_input_embeddings().weight
    language_model.save_pretrained(tmp_path)
    load_tokenizer(DECODERS[name]).save_pretrained(tmp_path)
    encoder = load_encoder(str(tmp_path))
    stored = load_file(tmp_path / "model.safetensors")
    for key, value in encoder.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, stored[f"model.{key}"].float()), key
    assert {buffer.dtype for buffer in encoder.buffers() if buffer.is_floating_point()} == {torch.float32}
