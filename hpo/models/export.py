"""A trained model as a folder that `transformers` and this package load.

The key `runtime` of hpo.json names the program that computes: `torch` (the default), `adapter`, or `onnx`
(`hpo.deploy.onnx_fp32` writes it, `hpo.inference.onnx_network` runs it). Each has a format number.
"""

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from importlib.util import find_spec
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
from hpo.models.encoder import ATTENTION_IMPLEMENTATIONS, load_encoder, load_tokenizer
from hpo.models.hub import hub_id
from hpo.models.multitask import HeadSettings, MultitaskModel
from hpo.models.own_encoder import load_own_encoder
from hpo.precision.table import PRECISIONS
from hpo.tasks.kind import KINDS, Task
from hpo.tasks.tokenized_split import Windowing
from hpo.versions import installed_versions

EXPORT_FORMATS = {"torch": 2, "onnx": 3, "adapter": 4}
"""The format of hpo.json for each runtime."""
_DAMAGES = (OSError, ValueError, LookupError, TypeError, ArithmeticError, RuntimeError, SafetensorError)
"""Errors from damaged files."""
BASE_FOLDER = "base"
_FILES = ("config.json", "heads.safetensors", "tokenizer.json", "tokenizer_config.json")
"""Required files beside hpo.json and the encoder's weights. Without the last, transformers would guess."""
MLFLOW_FILES = ("MLmodel", "requirements.txt")
"""Files for MLflow. They have no checksum, since its users may edit them."""
_FLAVOR = {
    "loader_module": "hpo.inference.mlflow_model",
    "python_version": platform.python_version(),
    # Options of `hpo.load`, which a user may change. Code of the study is not in the folder.
    "config": {"device": "auto", "precision": None, "trust_remote_code": False, "code": []},
}


@dataclass(frozen=True)
class BaseModel:
    """The encoder under an adapter."""

    encoder: str | None
    """Name in a study file, `minilm` or a hub id. None: it is in the folder `base` of the export."""
    revision: str | None
    digest: str
    """Its `base_digest`."""
    precision: str
    """The trial's `base_precision`."""


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """The settings of predictions, and the model's origin."""

    windowing: Windowing
    """How texts are cut into windows."""
    attention: str
    precision: str
    """Precision of the trial."""
    fp32_parts: tuple[str, ...] = ()
    """Parts of the model in fp32 inside autocast, see `hpo.models.model_parts`."""
    tf32: bool = False
    """True if fp32 products beside autocast may use TF32."""
    batch_tokens: int = 8192
    """Tokens in a batch of the study's evaluations, padding included."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Columns of `id`, `text` and `tokens` in the study's tables."""
    csv: Mapping[str, Any] = field(default_factory=dict)
    """The study's `data.csv`."""
    code: Mapping[str, str] = field(default_factory=dict)
    """Hash of each piece of the study's own code, by name."""
    decisions: Mapping[str, Any] = field(default_factory=dict)
    """Fields of each task's `DecodingThresholds`."""
    base: BaseModel | None = None
    """Encoder under an adapter that is exported without it."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """See `hpo.trial.best_model`."""


def export_model(
    model: MultitaskModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    settings: ExportSettings,
    base_encoder: Any | None = None,
) -> Path:
    """Write a folder for `transformers.AutoModel` (the encoder) and `hpo.load` (all of it).

        config.json, model.safetensors, tokenizer.json ...  the encoder and its tokenizer
        heads.safetensors                                   pooling, heads, log variances
        hpo.json                                            tasks, `ExportSettings`, checksums of the files
        MLmodel, requirements.txt                           for `mlflow models serve`, if MLflow is installed

    With `settings.base`, the adapter for `peft.PeftModel` replaces the encoder's weights:

        adapter_config.json, adapter_model.safetensors      the adapter
        base/                                               `base_encoder`, if the settings do not name it

    Weights keep their dtype. The folder appears at once or not at all. Raises ModelError if `directory` is
    neither free nor an earlier export.
    """
    base = settings.base
    with new_folder(directory) as folder:
        if base is None:
            model.encoder.save_pretrained(folder)
        else:
            model.encoder.config.save_pretrained(folder)
            save_adapter(model.encoder, folder, base.encoder and hub_id(base.encoder))
        if base_encoder is not None:
            base_encoder.save_pretrained(folder / BASE_FOLDER)
        tokenizer.save_pretrained(folder)
        state = model.state_dict().items()
        # A copy of each: a file of safetensors cannot hold tied weights.
        heads = {key: one.contiguous().clone() for key, one in state if not key.startswith("encoder.")}
        save_file(heads, folder / "heads.safetensors")
        head: dict[str, Any] = {"format": EXPORT_FORMATS["torch"]}
        if base is not None:
            head = {"format": EXPORT_FORMATS["adapter"], "runtime": "adapter"}
        write_metadata(folder, {**head, **export_metadata(model, settings)})
    return directory


@contextmanager
def new_folder(directory: Path, marker: str = "hpo.json") -> Iterator[Path]:
    """Yield a folder to fill. It becomes `directory` at the end of the block, or vanishes after an error.

    An earlier folder with the file `marker` is replaced. Raises ModelError if `directory` is not free or
    cannot be written, RunError if its disk fails.
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
    """Return the entries of hpo.json that every runtime has."""
    return {
        "tasks": model.tasks,
        **asdict(model.head_settings),
        **{one.name: getattr(settings, one.name) for one in fields(settings)},
    }


def write_metadata(folder: Path, content: Mapping[str, Any]) -> None:
    """Write hpo.json, with the checksums of all other files but `MLFLOW_FILES`. Write these, too."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in MLFLOW_FILES)
    content = {**content, "checksums": {path.relative_to(folder).as_posix(): _sha256(path) for path in files}}
    (folder / "hpo.json").write_text(json.dumps(content, indent=2, default=asdict) + "\n")
    if find_spec("mlflow") is not None:  # it takes seconds to import, and its YAML may be JSON
        # No signature: for one, MLflow would drop the columns of pairs, tokens and segments.
        model = {"flavors": {"python_function": _FLAVOR}}
        (folder / "MLmodel").write_text(json.dumps(model, indent=2) + "\n")
        names = ("precision-hpo", "mlflow-skinny", "torch", "transformers", "onnxruntime", "peft")
        lines = [f"{name}=={version}\n" for name, version in installed_versions(*names).items()]
        (folder / "requirements.txt").write_text("".join(lines))


def check_export_folder(directory: Path, marker: str = "hpo.json", study: str = "") -> None:
    """Raise ModelError unless `directory` can be written, and is free or has an earlier `marker`.

    With `study`, raise InputError for a model of another study.
    """
    try:
        above = next(path for path in directory.absolute().parents if path.exists())
        if not os.access(above, os.W_OK | os.X_OK):
            problem = f"{above} cannot be written"
        elif directory.exists() and any(directory.iterdir()) and not (directory / marker).is_file():
            problem = "this one holds other files"
        else:
            problem = ""
    except OSError as error:  # a file, a name that is too long, a folder without permission
        problem = str(error.strerror)
    if problem:
        raise ModelError(f"{directory}: an export needs a new or empty folder, but: {problem}.")
    if study and (directory / marker).exists():
        try:
            other = json.loads((directory / marker).read_text())["provenance"]["study"]
        except (OSError, ValueError, LookupError, TypeError):
            other = "unknown"
        if other != study:
            raise InputError(
                f"{directory} must be free for a model of `{study}`, but holds one of the study `{other}`. "
                "Name another folder, or remove that one."
            )


def load_exported(
    directory: str | Path, *, attention: str | None = None, trust_remote_code: bool = False
) -> tuple[MultitaskModel, PreTrainedTokenizerBase, ExportSettings]:
    """Return the model (fp32, evaluation mode), its tokenizer and settings. No setting is applied to it.

    `attention` replaces the model's own. On the same machine and in the same precision, the logits equal
    those of the exported model bit for bit. Raises ModelError if the folder is no intact export.
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
        model = MultitaskModel(encoder, tasks, HeadSettings(**_fields_of(HeadSettings, content)))
        encoder_state = {f"encoder.{name}": value for name, value in encoder.state_dict().items()}
        model.load_state_dict(encoder_state | heads)
    except _DAMAGES as error:
        raise ModelError(not_intact(directory, error)) from error
    tokenizer = load_tokenizer(str(directory), trust_remote_code=trust_remote_code, saved_class=True)
    return model.eval(), tokenizer, settings


def _fields_of(settings: type[Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a dataclass in hpo.json. All must be there: a default might change predictions."""
    return {one.name: content[one.name] for one in fields(settings)}


def _load_encoder(directory: Path, base: BaseModel | None, options: Mapping[str, Any]) -> nn.Module:
    if base is not None and base.encoder is not None:
        folder, revision = base.encoder, base.revision
    else:
        folder, revision = str(directory / BASE_FOLDER if base else directory), None
        if not any(Path(folder).glob("model*.safetensors")):  # transformers would read a pickle instead
            raise ModelError(not_intact(directory, "there is no model.safetensors"))
    try:
        own = load_own_encoder(directory) if base is None else None
    except _DAMAGES as error:
        raise ModelError(not_intact(directory, error)) from error
    encoder = own or load_encoder(folder, revision=revision, **options)
    if base is None:
        return encoder
    adapted = load_adapter(encoder, directory)
    if weights_digest(adapted) != base.digest:
        problem = "the encoder has other weights than the adapter was trained on"
        raise ModelError(not_intact(directory, problem))
    return adapted


def read_metadata(directory: Path) -> dict[str, Any]:
    """Return the content of hpo.json, with its `runtime`. Raises ModelError for another format."""
    try:
        content = json.loads((directory / "hpo.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(not_intact(directory, error)) from error
    head = content if isinstance(content, dict) else {}
    runtime, number = str(head.get("runtime", "torch")), head.get("format")
    if number is None or EXPORT_FORMATS.get(runtime) != number:
        known = " or ".join(f"{number} ({name})" for name, number in EXPORT_FORMATS.items())
        raise ModelError(
            f"{directory}/hpo.json must have the format {known}, but it has {number!r} ({runtime}). Use the "
            "version of hpo that wrote it, or export it again with `hpo best --export` or `hpo deploy`."
        )
    return {"runtime": runtime, **content}


def check_files(directory: Path, names: Iterable[str], content: Mapping[str, Any]) -> None:
    """Raise ModelError if a file of the folder is missing, or differs from its checksum in hpo.json."""
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
    """Return the tasks and settings in the content of hpo.json. Raises ModelError if they are invalid."""
    try:
        tasks = TypeAdapter(list[Task]).validate_python(content["tasks"])
        settings = TypeAdapter(ExportSettings).validate_python(_fields_of(ExportSettings, content))
    except (ValueError, LookupError) as error:
        raise ModelError(not_intact(directory, error)) from error
    use_code(settings.code, f"The model in {directory}", stays=True)
    names: list[tuple[str, Collection[str]]] = [(task.kind, KINDS) for task in tasks]
    names += [(settings.attention, ATTENTION_IMPLEMENTATIONS), (settings.precision, PRECISIONS)]
    for name, known in names:
        if name not in known:
            raise ModelError(not_intact(directory, f"`{name}` is none of {', '.join(known)}"))
    return tasks, settings


def not_intact(directory: Path, why: object) -> str:
    """Return the message about an unreadable folder."""
    return (
        f"{directory} must be a whole folder written by `hpo best --export` or `hpo deploy`, but reading it "
        f"failed: {shorten(str(why), 200)}."
    )
