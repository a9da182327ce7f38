"""A trained model as a folder that `transformers` and this package load.

hpo.json says by `runtime` what computes: `torch` (left out), whose weights lie beside it, or `onnx`, whose
graph does (`hpo.deploy.onnx_export` writes it, `hpo.inference.onnx_network` runs it). Each has its format.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedTokenizerBase

from hpo.code import use_code
from hpo.errors import InputError, ModelError, RunError, shorten
from hpo.models.adapters import ADAPTER_FILES, load_adapter, save_adapter, weights_digest
from hpo.models.encoder import ATTENTION_IMPLEMENTATIONS, hub_id, load_encoder, load_tokenizer
from hpo.models.multitask import HeadSettings, MultitaskModel
from hpo.models.own_encoder import load_own_encoder
from hpo.precision.table import PRECISIONS
from hpo.tasks.kind import KINDS, Task
from hpo.tasks.tokenized_split import Windowing

EXPORT_FORMATS = {"torch": 2, "onnx": 3, "adapter": 4}
"""The format of hpo.json by runtime."""
_DAMAGES = (OSError, ValueError, LookupError, TypeError, ArithmeticError, RuntimeError)
"""What files raise that are not as they were written."""
BASE_FOLDER = "base"
_FILES = ("config.json", "heads.safetensors", "tokenizer.json", "tokenizer_config.json")
"""Beside hpo.json and the encoder's weights, of which large ones are several. Without the last, transformers
would guess at a tokenizer."""


@dataclass(frozen=True)
class BaseModel:
    """The encoder under an adapter."""

    encoder: str | None
    """As a study names it, `minilm` or a hub id; None: it lies in the folder `base` of the export."""
    revision: str | None
    digest: str
    """Its `base_digest`."""
    precision: str
    """The trial's `base_precision`."""


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """What a model needs beside weights to predict as its trial did, and where it comes from."""

    windowing: Windowing
    """How texts are cut into windows."""
    attention: str
    precision: str
    """That in which the trial ran."""
    fp32_parts: tuple[str, ...] = ()
    """Parts of the model that compute in fp32 inside autocast, see `hpo.models.model_parts`."""
    tf32: bool = False
    """Whether fp32 products beside autocast may use TF32."""
    batch_tokens: int = 8192
    """Tokens of one batch, padding included, in the study's evaluations."""
    columns: Mapping[str, str | None] = field(default_factory=dict)
    """Where the study's tables have `id` and `text`."""
    csv: Mapping[str, str | None] = field(default_factory=dict)
    """How the study's csv files are written: its `data.csv`."""
    code: Mapping[str, str] = field(default_factory=dict)
    """The hashes of the code of the study, by name."""
    decisions: Mapping[str, Any] = field(default_factory=dict)
    """The keys of a `DecodingThresholds` of each task."""
    base: BaseModel | None = None
    """Of an adapter that is exported by itself, the encoder that it belongs to."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """See `hpo.trial.best_model`."""


def export_model(
    model: MultitaskModel, tokenizer: PreTrainedTokenizerBase, directory: Path, settings: ExportSettings
) -> Path:
    """Write a folder that `transformers.AutoModel` (the encoder) and `hpo.load` (all of it) load.

        config.json, model.safetensors, tokenizer.json ...  the encoder and its tokenizer
        heads.safetensors                                   pooling, heads, log variances
        hpo.json                                            tasks, `ExportSettings`, checksums of the files

    Weights keep their dtype. The folder appears at once or not at all. Raises ModelError where `directory`
    holds anything but an earlier export.
    """
    with new_folder(directory) as folder:
        model.encoder.save_pretrained(folder)
        _save_rest(model, tokenizer, folder, settings)
    return directory


def export_adapter(
    model: MultitaskModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    settings: ExportSettings,
    base: Any | None,
) -> Path:
    """As `export_model`, with the adapter by itself in place of the encoder: `peft.PeftModel` loads it.

        adapter_config.json, adapter_model.safetensors    the adapter
        config.json                                       of the encoder
        base/                                             the encoder under it, where `base` is given

    Else the encoder comes from the name in the settings again.
    """
    assert settings.base is not None
    with new_folder(directory) as folder:
        model.encoder.config.save_pretrained(folder)
        save_adapter(model.encoder, folder, settings.base.encoder and hub_id(settings.base.encoder))
        if base is not None:
            base.save_pretrained(folder / BASE_FOLDER)
        _save_rest(model, tokenizer, folder, settings)
    return directory


def _save_rest(
    model: MultitaskModel, tokenizer: PreTrainedTokenizerBase, folder: Path, settings: ExportSettings
) -> None:
    tokenizer.save_pretrained(folder)
    heads = {
        name: value.contiguous()
        for name, value in model.state_dict().items()
        if not name.startswith("encoder.")
    }
    save_file(heads, folder / "heads.safetensors")
    runtime = "torch" if settings.base is None else "adapter"
    head = {"format": EXPORT_FORMATS[runtime], **({"runtime": runtime} if settings.base else {})}
    write_metadata(folder, {**head, **export_metadata(model, settings)})


@contextmanager
def new_folder(directory: Path, marker: str = "hpo.json") -> Iterator[Path]:
    """Yield a folder to be filled, that becomes `directory` when the block ends, or vanishes if it raises.

    `marker` is the file by which an earlier one is known, which is replaced. Raises ModelError where
    `directory` holds anything else, or cannot be written, RunError where its disk fails while it is filled.
    """
    check_export_folder(directory, marker)
    staging = directory.with_name(f".{directory.name}-{os.getpid()}")
    try:
        staging.mkdir(parents=True)
    except OSError as error:
        raise ModelError(f"{directory}: an export needs a new folder, but: {error.strerror}.") from error
    try:
        yield staging
        # safetensors writes files that only their owner can read, whatever the umask.
        for file in filter(Path.is_file, staging.iterdir()):
            file.chmod((staging / marker).stat().st_mode)
        if directory.exists():
            shutil.rmtree(directory)
        staging.rename(directory)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"{directory} could not be written: {shorten(str(error), 300)}. Free space, or name a folder on "
            "another disk."
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def export_metadata(model: MultitaskModel, settings: ExportSettings) -> dict[str, Any]:
    """What hpo.json says of any runtime."""
    return {
        "tasks": model.tasks,
        **asdict(model.head_settings),
        **{one.name: getattr(settings, one.name) for one in fields(settings)},
    }


def write_metadata(folder: Path, content: Mapping[str, Any]) -> None:
    """Write hpo.json, with the checksums of all other files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    content = {**content, "checksums": {path.relative_to(folder).as_posix(): _sha256(path) for path in files}}
    (folder / "hpo.json").write_text(json.dumps(content, indent=2, default=asdict) + "\n")


def check_export_folder(directory: Path, marker: str = "hpo.json", study: str = "") -> None:
    """Raise ModelError unless `directory` is free, or holds an earlier `marker`, and can be written.

    With `study`, the directory must not hold a model of another study; otherwise InputError is raised.
    """
    try:
        above = next(path for path in directory.absolute().parents if path.exists())
        if not os.access(above, os.W_OK | os.X_OK):
            problem = f"{above} cannot be written"
        elif directory.exists() and any(directory.iterdir()) and not (directory / marker).is_file():
            problem = "this one holds other files"
        else:
            if study:
                _check_study(directory / marker, study)
            return
    except OSError as error:  # a file, a name that is too long, a folder that may not be read
        problem = str(error.strerror)
    raise ModelError(f"{directory}: an export needs a new or empty folder, but: {problem}.")


def _check_study(metadata: Path, study: str) -> None:
    """Raise InputError if the metadata of an export name another study."""
    if not metadata.exists():
        return
    try:
        other = json.loads(metadata.read_text())["provenance"]["study"]
    except (OSError, ValueError, LookupError, TypeError):
        other = "unknown"
    if other != study:
        raise InputError(
            f"{metadata.parent} must be free for a model of `{study}`, but holds one of the study `{other}`. "
            "Name another folder, or remove that one."
        )


def load_exported(
    directory: str | Path, *, attention: str | None = None, trust_remote_code: bool = False
) -> tuple[MultitaskModel, PreTrainedTokenizerBase, ExportSettings]:
    """Return model (fp32, evaluation mode), tokenizer and settings, of which none is applied to the model.

    `attention` replaces the one that the model was trained with, for a machine that lacks it. Logits are
    those of the exported model, bit for bit, on the same machine in the same precision.

    Raises ModelError where the folder is no intact export.
    """
    directory = Path(directory).resolve()
    content = read_metadata(directory)
    if content["runtime"] == "onnx":
        raise ModelError(f"{directory} must hold torch's weights, but it is an ONNX export. Use `hpo.load`.")
    tasks, settings = read_settings(directory, content)
    check_files(directory, (*_FILES, *(ADAPTER_FILES if settings.base else ())), content)
    options: dict[str, Any] = {
        "attention": attention or settings.attention,
        "trust_remote_code": trust_remote_code,
    }
    encoder = _load_encoder(directory, settings.base, options)
    try:
        heads = load_file(directory / "heads.safetensors")
        content = {"option": {}, "head_types": {}, **content}  # of exports that are older than these settings
        head_settings = HeadSettings(**{one.name: content[one.name] for one in fields(HeadSettings)})
        model = MultitaskModel(encoder, tasks, head_settings)
        of_encoder = {f"encoder.{name}": value for name, value in encoder.state_dict().items()}
        model.load_state_dict(of_encoder | heads)
    except (*_DAMAGES, SafetensorError) as error:
        raise ModelError(not_intact(directory, error)) from error
    tokenizer = load_tokenizer(str(directory), trust_remote_code=trust_remote_code)
    return model.eval(), tokenizer, settings


def _load_encoder(directory: Path, base: BaseModel | None, options: Mapping[str, Any]) -> nn.Module:
    if base is not None and base.encoder is not None:
        folder, revision = base.encoder, base.revision
    else:
        folder, revision = str(directory / BASE_FOLDER if base else directory), None
        if not any(Path(folder).glob("model*.safetensors")):  # transformers would take a pickle in its place
            raise ModelError(not_intact(directory, "there is no model.safetensors"))
    try:
        own = load_own_encoder(directory) if base is None else None
    except (*_DAMAGES, SafetensorError) as error:
        raise ModelError(not_intact(directory, error)) from error
    encoder = own or load_encoder(folder, revision=revision, **options)
    if base is None:
        return encoder
    adapted = load_adapter(encoder, directory)
    if weights_digest(adapted) != base.digest:
        raise ModelError(
            not_intact(directory, "the encoder has other weights than the adapter was trained on")
        )
    return adapted


def read_metadata(directory: Path) -> dict[str, Any]:
    """The content of hpo.json, with its `runtime`. Raises ModelError unless it is one of this format."""
    try:
        content = json.loads((directory / "hpo.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(not_intact(directory, error)) from error
    head = content if isinstance(content, dict) else {}
    runtime, of = str(head.get("runtime", "torch")), head.get("format")
    if of is None or EXPORT_FORMATS.get(runtime) != of:
        known = " or ".join(f"{number} ({name})" for name, number in EXPORT_FORMATS.items())
        raise ModelError(
            f"{directory}/hpo.json must have the format {known}, but it has {of!r} ({runtime}). Use the "
            "version of hpo that wrote it, or export it again with `hpo best --export` or `hpo deploy`."
        )
    return {"runtime": runtime, **content}


def check_files(directory: Path, names: Iterable[str], content: Mapping[str, Any]) -> None:
    """Raise ModelError where a file of the folder is missing, or is not the one of which hpo.json tells.

    Exports of earlier versions have no checksums in their `content`.
    """
    checksums = content.get("checksums", {})
    if not isinstance(checksums, dict):
        raise ModelError(not_intact(directory, "its checksums are no mapping"))
    for name in dict.fromkeys([*names, *checksums]):
        path = directory / name
        if directory not in Path(os.path.normpath(path)).parents or not path.is_file():
            raise ModelError(not_intact(directory, f"there is no {name}"))
        if name in checksums and _sha256(path) != checksums[name]:
            raise ModelError(not_intact(directory, f"{name} has changed since: its checksum is another"))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_settings(directory: Path, content: Mapping[str, Any]) -> tuple[list[Task], ExportSettings]:
    """Tasks and settings in the `content` of the folder's hpo.json. Raises ModelError where it lacks them."""
    try:
        tasks = TypeAdapter(list[Task]).validate_python(content["tasks"])
        # Exports of earlier versions lack some.
        content = {"csv": {}, "code": {}, "base": None, **content}
        given = {one.name: content[one.name] for one in fields(ExportSettings)}
        settings = TypeAdapter(ExportSettings).validate_python(given)
    except (ValueError, LookupError) as error:
        raise ModelError(not_intact(directory, error)) from error
    use_code(settings.code, f"The model in {directory}", stays=True)
    if content.get("float32_parts"):
        raise ModelError(f"{directory} has parts in fp32: use the earlier hpo that wrote it.")
    named: list[tuple[str, Collection[str]]] = [(task.kind, KINDS) for task in tasks]
    named += [(settings.attention, ATTENTION_IMPLEMENTATIONS), (settings.precision, PRECISIONS)]
    for name, known in named:
        if name not in known:
            raise ModelError(not_intact(directory, f"`{name}` is none of {', '.join(known)}"))
    return tasks, settings


def not_intact(directory: Path, why: object) -> str:
    """The message of a folder that cannot be read."""
    return (
        f"{directory} must be a whole folder written by `hpo best --export` or `hpo deploy`, but reading it "
        f"failed: {shorten(str(why), 200)}."
    )
