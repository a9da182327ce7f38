"""Every way in which an encoder can be wrong ends in one clear ModelError, and quickly."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertModel, GPT2Config, GPT2Model, T5Config, T5Model, ViTConfig, ViTModel

from hpo.data.tasks import Task
from hpo.errors import InputError, ModelError
from hpo.models.encoder import load_encoder, load_tokenizer, resolve_encoder
from hpo.models.multitask import MultitaskModel, build_model

TASKS = (Task("label", "single_label", ("a", "b")),)
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
BERT: dict[str, Any] = {"model_type": "bert", "hidden_size": 32, **SIZES, "max_position_embeddings": 64}


def build(encoder: str | dict[str, Any] = BERT, **settings: Any) -> MultitaskModel:
    return build_model(encoder, TASKS, **{"max_length": 16, **settings})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good folder, for a test to break."""
    path = tmp_path / "encoder"
    module: Any = load_encoder(BERT)
    module.save_pretrained(path)
    load_tokenizer(BERT).save_pretrained(path)
    return path


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_a_model_error_is_the_users_to_mend() -> None:
    assert issubclass(ModelError, InputError)
    assert ModelError.exit_code == 2


# Names and folders.


@pytest.mark.parametrize("name", ["./models/bert", "/no/such/folder", "~/nothing/here", "a/b/c", ""])
def test_a_name_that_is_neither_folder_nor_hub_id(name: str, tmp_path: Path) -> None:
    if not name:
        # The study's own folder: it is one, but holds no model.
        with pytest.raises(ModelError, match=r"must hold a config\.json, but there is none"):
            load_encoder(resolve_encoder(name, tmp_path))
        return
    with pytest.raises(ModelError, match=r"must be `minilm`, a hub id .* is no folder"):
        resolve_encoder(name, tmp_path)


def test_a_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    for load in (load_encoder, load_tokenizer):
        with pytest.raises(ModelError, match=r"must hold a config\.json, but there is none"):
            load(str(folder))


@pytest.mark.parametrize(("content", "message"), [("{", "must be JSON"), ("[]", "must be a JSON object")])
def test_a_config_that_is_no_configuration(folder: Path, content: str, message: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        build(str(folder))


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"must hold weights \(model\.safetensors .* but there are none"):
        build(str(folder))


def test_a_folder_with_a_shard_missing(folder: Path) -> None:
    module: Any = load_encoder(str(folder))
    (folder / "model.safetensors").unlink()
    module.save_pretrained(folder, max_shard_size="1MB")
    next(folder.glob("model-*.safetensors")).unlink()
    with pytest.raises(ModelError, match=r"or all shards of an index\), but there are none"):
        build(str(folder))
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ModelError, match=r"or all shards of an index\), but there are none"):
        build(str(folder))


def test_torn_weights(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="could not be loaded"):
        build(str(folder))


def test_weights_of_another_model(folder: Path) -> None:
    save_file({"something.weight": torch.ones(3)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"\d+ tensors are missing and would be random: embeddings"):
        build(str(folder))


def test_weights_with_one_tensor_missing(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"1 tensors are missing .*: encoder\.layer\.1\.output\.dense\.weight"
    ):
        build(str(folder))


def test_weights_without_a_pooler_are_fine(folder: Path) -> None:
    weights = {k: v for k, v in load_file(folder / "model.safetensors").items() if "pooler" not in k}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    build(str(folder))


def test_weights_of_another_size(folder: Path) -> None:
    change_config(folder, hidden_size=64)
    with pytest.raises(ModelError, match="could not be loaded"):
        build(str(folder))


def test_a_folder_without_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()
    with pytest.raises(ModelError, match="a tokenizer must have a vocabulary, but there is none"):
        load_tokenizer(str(folder))


def test_a_tokenizer_with_more_tokens_than_embeddings(folder: Path) -> None:
    change_config(folder, vocab_size=30000)
    with pytest.raises(ModelError, match=r"vocab_size is 30000 and the tokenizer .* has 30522 tokens"):
        load_tokenizer(str(folder))
    with pytest.raises(ModelError, match=r"vocab_size is 100 and the tokenizer .* has 30522 tokens"):
        build({**BERT, "vocab_size": 100})


def test_a_model_type_from_the_future(folder: Path) -> None:
    change_config(folder, model_type="bertt")
    with pytest.raises(ModelError, match=r"it is 'bertt'\. Did you mean `\w*bert\w*`"):
        build(str(folder))


# Code that comes with the model.


def add_code(folder: Path) -> None:
    change_config(
        folder,
        model_type="homemade",
        auto_map={"AutoConfig": "homemade.HomemadeConfig", "AutoModel": "homemade.HomemadeModel"},
    )
    (folder / "homemade.py").write_text(
        "from pathlib import Path\n"
        "from transformers import BertConfig, BertModel\n"
        "Path(__file__).with_name('ran').touch()\n"
        "class HomemadeConfig(BertConfig):\n"
        "    model_type = 'homemade'\n"
        "class HomemadeModel(BertModel):\n"
        "    config_class = HomemadeConfig\n"
    )


def test_code_of_a_model_runs_only_when_trusted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers.dynamic_module_utils

    modules = tmp_path / "modules"
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(modules))
    monkeypatch.syspath_prepend(str(modules))
    add_code(folder)
    with pytest.raises(ModelError, match=r"set `model\.trust_remote_code: true`"):
        build(str(folder))
    assert not list(tmp_path.rglob("ran"))
    trusted = build(str(folder), trust_remote_code=True)
    assert isinstance(trusted.encoder, BertModel)
    assert type(trusted.encoder).__name__ == "HomemadeModel"
    assert list(tmp_path.rglob("ran"))


# Models that are no encoders.


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            lambda: GPT2Model(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=30522)),
            "gpt2 is a decoder: a token sees only those before it",
        ),
        (
            lambda: T5Model(T5Config(d_model=32, d_ff=64, num_layers=1, num_heads=2, vocab_size=30522)),
            "t5 is an encoder-decoder",
        ),
        (
            lambda: ViTModel(ViTConfig(hidden_size=32, **SIZES)),
            "must take input_ids and attention_mask, but ViTModel does not",
        ),
    ],
    ids=["decoder", "encoder-decoder", "vision"],
)
def test_only_text_encoders_are_trained(module: Any, message: str, tmp_path: Path) -> None:
    module().save_pretrained(tmp_path / "other")
    load_tokenizer("minilm").save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match=message):
        build(str(tmp_path / "other"))


def test_a_bert_that_was_made_a_decoder() -> None:
    with pytest.raises(ModelError, match="bert is a decoder"):
        build({**BERT, "is_decoder": True})


# Inline configurations.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_sise": 64}, r"`hidden_sise` is not a key of bert\. Did you mean `hidden_size`"),
        ({"n_layers": 4}, "`n_layers` is not a key of bert"),
        ({"dtype": "bfloat16"}, "`dtype` is not a key of bert"),
        ({"model_type": "brt"}, r"got `brt`\. Did you mean `\w*b\w*rt\w*`"),
        ({"model_type": None}, "must have a `model_type` that transformers knows"),
        ({"hidden_size": "wide"}, "a fresh bert could not be loaded .*hidden_size"),
        ({"hidden_size": 33}, "hidden size .33. is not a multiple of the number of attention heads"),
        ({"hidden_act": "gulu"}, "a fresh bert could not be loaded .*gulu"),
        ({"tokenizer": "./nowhere"}, r"`\./nowhere` must be .* no folder"),
        ({"tokenizer": 3}, "`tokenizer` must be a name or a folder, but got 3"),
    ],
)
def test_a_bad_inline_configuration(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build({**BERT, **changes})


# Settings that the encoder or the machine cannot do.


@pytest.mark.parametrize(
    ("encoder", "settings", "message"),
    [
        (
            {},
            {"max_length": 65},
            "max_length must be at most the 64 positions of this BertModel, but it is 65",
        ),
        ({"model_type": "roberta"}, {"max_length": 64}, "at most the 63 positions of this RobertaModel"),
        (
            {"model_type": "modernbert"},
            {"max_length": 65},
            "at most the 64 positions of this ModernBertModel",
        ),
        ({}, {"freeze_layers": 3}, "between 0 and the encoder's 2 layers, but it is 3"),
        ({}, {"freeze_layers": -1}, "between 0 and the encoder's 2 layers, but it is -1"),
        (
            {"model_type": "albert", "embedding_size": 16},
            {"freeze_layers": 1},
            "must have one list of its 2 layers, but it has 0. Leave freeze_layers at 0",
        ),
        (
            {"model_type": "mpnet"},
            {"attention": "eager", "gradient_checkpointing": True},
            "gradient_checkpointing: MPNetModel does not support it",
        ),
        (
            {"model_type": "mpnet"},
            {"attention": "sdpa"},
            "attention: `sdpa` does not work for a fresh mpnet here.* Use eager or flash",
        ),
        ({}, {"attention": "best"}, r"attention: unknown `best`\. Known: sdpa, eager, flash"),
        ({}, {"attention": "flsh"}, r"unknown `flsh`\. Did you mean `flash`"),
        (
            {"model_type": "modernbert"},
            {"attention": "flex"},
            "attention: unknown `flex`",
        ),
        ({}, {"pooling": "men"}, r"pooling: unknown `men`\. Did you mean `mean`"),
        ({}, {"head_type": "conv"}, r"head_type: unknown `conv`\. Known: linear, mlp"),
        ({}, {"loss_weighting": "uncertain"}, "loss_weighting: unknown `uncertain`"),
    ],
)
def test_a_setting_that_the_encoder_cannot_do(
    encoder: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        build({**BERT, **encoder}, **settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine may have flash attention")
def test_flash_attention_without_a_gpu() -> None:
    with pytest.raises(ModelError, match=r"attention: `flash` does not work for .* Use sdpa or eager"):
        build(attention="flash")


def test_a_dropout_that_the_encoder_does_not_have() -> None:
    squeezed = {
        "model_type": "roformer",
        "hidden_size": 32,
        **SIZES,
        "embedding_size": 16,
    }
    build(squeezed, attention="eager", dropout=0.2, attention_dropout=0.2)
    fnet = {"model_type": "fnet", "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64}
    with pytest.raises(ModelError, match="attention_dropout: a fresh fnet must have one of attention_probs"):
        build(fnet, attention="eager", attention_dropout=0.2)


def test_an_encoder_that_does_not_see_the_mask() -> None:
    fnet = {"model_type": "fnet", "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64}
    with pytest.raises(ModelError, match="must take input_ids and attention_mask, but FNetModel does not"):
        build(fnet, attention="eager")


def test_no_task() -> None:
    with pytest.raises(ModelError, match="at least one task"):
        build_model(BERT, (), max_length=16)


# The hub out of reach.


class RefusingServer:
    """Accepts connections and closes them at once; counts them."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.connections = 0
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.socket.getsockname()[1]}"

    def serve(self) -> None:
        while True:
            connection, _ = self.socket.accept()
            with connection:
                if connection.recv(1) == b"Q":
                    return
                self.connections += 1  # before it is closed: the client looks at the count as soon as it is

    def close(self) -> None:
        with socket.create_connection(self.socket.getsockname()) as connection:
            connection.sendall(b"Q")
        self.thread.join()
        self.socket.close()


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def refusing_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RefusingServer]:
    server = RefusingServer()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    try:
        yield server
    finally:
        server.close()


@pytest.mark.parametrize("load", [load_encoder, load_tokenizer])
@pytest.mark.usefixtures("empty_cache")
def test_a_hub_name_in_offline_mode(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="not in the Hugging Face cache, and HF_HUB_OFFLINE forbids"):
        load("someone/tiny")


@pytest.mark.parametrize("load", [load_encoder, load_tokenizer])
@pytest.mark.usefixtures("empty_cache")
def test_a_hub_name_without_network_fails_after_one_try(load: Any, refusing_server: RefusingServer) -> None:
    with pytest.raises(ModelError, match=r"the hub could not be reached \(.*Check the network"):
        load("someone/tiny")
    assert refusing_server.connections == 1


def test_an_incomplete_cache_is_not_taken_for_a_model(
    empty_cache: Path, folder: Path, refusing_server: RefusingServer
) -> None:
    snapshot = empty_cache / "models--someone--tiny" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    reference = empty_cache / "models--someone--tiny" / "refs" / "main"
    reference.parent.mkdir()
    reference.write_text("a" * 40)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (snapshot / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(ModelError, match="the hub could not be reached"):
        load_encoder("someone/tiny")
    (snapshot / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    connections = refusing_server.connections
    load_encoder("someone/tiny")
    assert refusing_server.connections == connections
