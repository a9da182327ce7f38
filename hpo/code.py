"""A study's own code: Python files and installed modules with extensions and kinds of tasks.

A study's definition has the SHA-256 of each. The user of a machine names its location: in the study file,
with `--trust-code`, or to `hpo.load`. So a writer of the database can run nothing else, and a study never
continues with other code.
"""

import hashlib
import os
import re
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, TypeVar

from hpo.errors import CodeError, HpoError, InputError
from hpo.memory import is_out_of_memory

ENTRY_POINTS = "hpo.plugins"
HUB = "optunahub:"
"""Prefix of OptunaHub's samplers and pruners."""
_CLASS = re.compile(rf"{HUB}\w+(/\w[\w-]*)+(@\w[\w./-]*)?(:\w+)?|([A-Za-z_]\w*\.)+[A-Z]\w*")

T = TypeVar("T")
_allows_unknown: ContextVar[bool] = ContextVar("allows_unknown", default=False)


class Registry(dict[str, T]):
    """Extensions by name, of this package and of the code in use."""

    def __init__(self, kind: str, reserved: Collection[str] = ()) -> None:
        """`kind` is the noun in messages. `reserved` are other names of this package."""
        super().__init__()
        self.kind = kind
        self.reserved = reserved
        _registries.append(self)

    def add(self, name: str, thing: T) -> None:
        """Add an extension. Raises ValueError if another one has the name."""
        if name in self.reserved or self.setdefault(name, thing) is not thing:
            raise ValueError(f"there is a {self.kind} `{name}` already.")

    def accepts(self, name: object) -> bool:
        """Return whether a study may use the name (see `unknown_names_allowed`)."""
        return isinstance(name, str) and (name in self or _allows_unknown.get())

    def hash_of(self, name: str) -> str:
        """Return the hash of the code of an extension; empty for this package."""
        pairs = ((sha, added[2]) for sha, code in _codes.items() for added in code.added or ())
        return next((sha for sha, thing in pairs if thing is self[name]), "")


_Added = tuple[Registry[Any], str, Any]


@dataclass
class Code:
    """A file, or the module of a package, with its content at the time of its naming in this process."""

    name: str
    """Name in a study's definition."""
    location: str
    """Absolute path, or name of the module, for other processes of this machine."""
    files: Mapping[str, bytes]
    """{path: content}."""
    paths: set[str] = field(default_factory=set)
    """All paths with this content. An error has the path of the file that ran."""
    added: list[_Added] | None = None
    """Its extensions; None: it has not run."""
    in_use: bool = False
    stays: bool = False

    @property
    def is_file(self) -> bool:
        return self.location in self.files

    @property
    def sha256(self) -> str:
        """Hash of the file. For a package: hash of the output of `sha256sum` for its files."""
        sums = {Path(path): hashlib.sha256(text).hexdigest() for path, text in self.files.items()}
        if len(sums) == 1:
            return sums.popitem()[1]
        root = next(iter(sums)).parent
        listed = "".join(f"{one}  {path.relative_to(root)}\n" for path, one in sums.items())
        return hashlib.sha256(listed.encode()).hexdigest()


_registries: list[Registry[Any]] = []
_codes: dict[str, Code] = {}
"""{hash: code}."""
_classes: set[str] = set()
"""Trusted classes of samplers and pruners."""


def name_code(given: str, folder: Path = Path()) -> Code:
    """Let studies use a code named by the user of this machine.

    `given` is the path of a `.py` file relative to `folder`, an entry point of `ENTRY_POINTS` or a module.
    Raises ValueError if there is none.
    """
    if given.endswith(".py"):
        path = Path(os.path.normpath(Path(folder, Path(given).expanduser()).absolute()))
        name, location, paths = path.name, str(path), [path]
    else:
        entry = next(iter(entry_points(group=ENTRY_POINTS, name=given)), None)
        name, location = given, entry.module if entry else given
        paths = _files_of(location)
    try:
        code = Code(name, location, {str(path): path.read_bytes() for path in paths})
    except OSError as error:
        raise ValueError(
            f"{error.filename} must be a file that can be read, but: {error.strerror}."
        ) from None
    known = _codes.setdefault(code.sha256, code)
    known.name, known.location, known.files = code.name, code.location, code.files
    known.paths |= code.files.keys()
    return known


def trust(given: str) -> Code:
    """Let studies use a code, or a class of a sampler or pruner, named by the user of this machine.

    Raises ValueError if there is none.
    """
    try:
        return name_code(given)
    except ValueError:
        if not is_class_name(given):
            raise
    _classes.add(given)
    return Code(given, given, {})


def is_class_name(name: object) -> bool:
    """Return whether a sampler or pruner is a class: `package.Class` or one of OptunaHub."""
    return isinstance(name, str) and _CLASS.fullmatch(name) is not None


def is_trusted_class(name: str) -> bool:
    return name in _classes


def _files_of(module: str) -> list[Path]:
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not str(spec.origin).endswith(".py"):
        raise ValueError(f"must be the path of a .py file, or an installed module, but got `{module}`.")
    own = Path(str(spec.origin))
    inside = sorted(own.parent.rglob("*.py")) if spec.submodule_search_locations else []
    return [own, *(path for path in inside if path != own)]


def use_code(code: Mapping[str, str], who: str, *, stays: bool = False) -> None:
    """Run the code of a study or a model once, and add its extensions.

    Args:
        code: {name: hash}.
        who: subject of the error message.
        stays: keep it for good and keep the code in use; otherwise it replaces the code in use.

    Raises InputError if the user has not named code of this hash, or if it fails.
    """
    for name, sha in code.items():
        if sha not in _codes:
            others = [each.location for each in _codes.values() if each.name == name]
            has = f" {others[-1]} is other code: its hash is another." if others else ""
            raise InputError(
                f"{who} needs the code `{name}` with the SHA-256 {sha[:16]}, which runs only where the user "
                f"of this machine names it.{has} Read that code, then give --trust-code FILE "
                "(`trust_code=` of hpo.Study, `code=` of hpo.load), or the study's own file."
            )
    for other in _codes.values():
        if other.in_use and not (other.stays or stays):
            _withdraw(other)
    for one in (_codes[sha] for sha in code.values()):
        if one.added is None:
            one.added = _run(one)
        try:
            for registry, name, thing in one.added:
                registry.add(name, thing)
        except ValueError as error:
            _withdraw(one)
            raise InputError(
                f"{one.location}: {error} Other code of this process has added it; use a new process."
            ) from None
        one.in_use, one.stays = True, stays or one.stays


def _withdraw(code: Code) -> None:
    for registry, name, thing in code.added or ():
        if registry.get(name) is thing:
            del registry[name]
    code.in_use = code.stays = False


def is_in_use(code: object) -> bool:
    """Return whether all extensions of this code are available."""
    return isinstance(code, Mapping) and all(sha in _codes and _codes[sha].in_use for sha in code.values())


@contextmanager
def unknown_names_allowed(code: object) -> Iterator[None]:
    """Accept any name of an extension in this block, unless all of the study's `code` is in use here.

    A study can then be read where its code is missing.
    """
    token = _allows_unknown.set(not is_in_use(code))
    try:
        yield
    finally:
        _allows_unknown.reset(token)


def code_in_use(code: Mapping[str, str], classes: Iterable[str] = ()) -> list[Code]:
    """Return the code of a study on this machine, then its `classes`."""
    files = [_codes[sha] for sha in code.values() if sha in _codes]
    return files + [Code(name, name, {}) for name in classes]


def trust_options(code: Mapping[str, str], classes: Iterable[str] = ()) -> list[str]:
    """Return the options that let another process of this machine run the code and the classes."""
    return [word for each in code_in_use(code, classes) for word in ("--trust-code", each.location)]


def _run(code: Code) -> list[_Added]:
    """Run the code and return its extensions. Raises InputError with the line of a failure."""
    before = [(registry, dict(registry)) for registry in _registries]
    private = f"hpo_code_{code.sha256[:16]}"
    try:
        if code.is_file:
            spec = spec_from_file_location(private, code.location)
            assert spec is not None
            module = sys.modules[private] = module_from_spec(spec)
            exec(compile(code.files[code.location], code.location, "exec"), module.__dict__)
        else:
            import_module(code.location)
    except (Exception, SystemExit) as error:
        sys.modules.pop(private, None)
        for registry, content in before:
            registry.clear()
            registry.update(content)
        line = _line_of([code], error) or code.location
        raise InputError(f"{line}: {type(error).__name__}: {error}") from error
    return [
        (registry, name, thing)
        for registry, content in before
        for name, thing in registry.items()
        if name not in content
    ]


@contextmanager
def errors_of_code() -> Iterator[None]:
    """Raise CodeError with the line for an error of the code in this block, except for lack of memory."""
    try:
        yield
    except (Exception, SystemExit) as error:
        is_other = isinstance(error, HpoError) or is_out_of_memory(error)
        if not is_other and (line := _line_of(_codes.values(), error)):
            raise CodeError(f"{line}: {type(error).__name__}: {error}") from error
        raise


def _line_of(codes: Iterable[Code], error: BaseException) -> str | None:
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        frames.append((str(error.filename), error.lineno))
    files = {file for code in codes for file in code.paths}
    return next((f"{file}:{line}" for file, line in reversed(frames) if file in files), None)
