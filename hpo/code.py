"""Code that a study brings: Python files and installed modules, which add extensions and kinds of tasks.

A study's definition names each with the SHA-256 of its content. The user of each machine says where it lies:
in the study file, with `--trust-code`, or to `hpo.load`. So whoever can write to the database has nothing run
that the user did not name, and no study goes on with other code.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, TypeVar

from hpo.errors import HpoError, InputError
from hpo.memory import is_out_of_memory

ENTRY_POINTS = "hpo.plugins"
HUB = "optunahub:"
"""A class of a sampler or a pruner that begins with this is one of OptunaHub."""
_CLASS = re.compile(rf"{HUB}\w+(/\w[\w-]*)+(@\w[\w./-]*)?(:\w+)?|([A-Za-z_]\w*\.)+[A-Z]\w*")

T = TypeVar("T")
_takes_unknown: ContextVar[bool] = ContextVar("takes_unknown", default=False)


class Registry(dict[str, T]):
    """Things by their names: those of this package, and those of the code in use."""

    def __init__(self, what: str, taken: Collection[str] = ()) -> None:
        """`taken` are names of this package that are not in it."""
        super().__init__()
        self.what = what
        self.taken = taken
        _registries.append(self)

    def add(self, name: str, thing: T) -> None:
        """Raises ValueError where another thing has the name."""
        if name in self.taken or self.setdefault(name, thing) is not thing:
            raise ValueError(f"there is a {self.what} `{name}` already.")

    def takes(self, name: object) -> bool:
        """Whether a study may use the name; any, where its code is not in use (`names_of`)."""
        return isinstance(name, str) and (name in self or _takes_unknown.get())

    def hash_of(self, name: str) -> str:
        """Of the code that brought the thing; empty: it is of this package."""
        brought = ((sha, each[2]) for sha, code in _codes.items() for each in code.things or ())
        return next((sha for sha, thing in brought if thing is self[name]), "")


_Thing = tuple[Registry[Any], str, Any]


@dataclass
class Code:
    """A file, or the module of a package, as it was when the user named it in this process."""

    name: str
    """In the definition of a study."""
    place: str
    """Its absolute path, or the module's name: what another process of this machine finds it by."""
    files: Mapping[str, bytes]
    """Content by path."""
    things: list[_Thing] | None = None
    """What it has added; None: it has not run."""
    in_use: bool = False
    stays: bool = False

    @property
    def is_file(self) -> bool:
        return self.place in self.files

    @property
    def sha256(self) -> str:
        """Of the file; of a package, of a list of its files as `sha256sum` prints it."""
        sums = {Path(path): hashlib.sha256(text).hexdigest() for path, text in self.files.items()}
        if len(sums) == 1:
            return sums.popitem()[1]
        root = next(iter(sums)).parent
        listed = "".join(f"{one}  {path.relative_to(root)}\n" for path, one in sums.items())
        return hashlib.sha256(listed.encode()).hexdigest()


_registries: list[Registry[Any]] = []
_codes: dict[str, Code] = {}
"""By hash."""
_classes: dict[str, Code] = {}
"""By name, the classes of samplers and pruners that the user of this machine has named."""


def name_code(given: str, folder: Path = Path()) -> Code:
    """Let studies use the code that a user of this machine names.

    `given` is the path of a `.py` file, relative to `folder`, an entry point of `ENTRY_POINTS` or a module.
    Raises ValueError if there is none.
    """
    if given.endswith(".py"):
        path = Path(os.path.normpath(Path(folder, Path(given).expanduser()).absolute()))
        name, place, paths = path.name, str(path), [path]
    else:
        entry = next(iter(entry_points(group=ENTRY_POINTS, name=given)), None)
        name, place = given, entry.module if entry else given
        paths = _files_of(place)
    try:
        code = Code(name, place, {str(path): path.read_bytes() for path in paths})
    except OSError as error:
        raise ValueError(
            f"{error.filename} must be a file that can be read, but: {error.strerror}."
        ) from None
    known = _codes.setdefault(code.sha256, code)
    known.name, known.place, known.files = code.name, code.place, code.files
    return known


def trust(given: str) -> Code:
    """Let studies use the code, or the class of a sampler or a pruner, that a user of this machine names.

    Raises ValueError if there is none.
    """
    try:
        return name_code(given)
    except ValueError:
        if not is_class_name(given):
            raise
    return _classes.setdefault(given, Code(given, given, {}))


def is_class_name(name: object) -> bool:
    """Whether the name of a sampler or a pruner is that of a class: `package.Class` or one of OptunaHub."""
    return isinstance(name, str) and _CLASS.fullmatch(name) is not None


def is_trusted_class(name: str) -> bool:
    """Whether the user of this machine has named the class."""
    return name in _classes


def _files_of(module: str) -> list[Path]:
    """The files of a module, or of a package with all that is in it; its own first."""
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
    """Run the code of a study or a model, unless it has run, and make its names known.

    Args:
        code: hashes by name.
        who: asks for it, as a message begins.
        stays: beside the code in use, and for good; left out, in place of it.

    Raises InputError if the user has not named code of that hash, or it cannot be run.
    """
    for name, sha in code.items():
        if sha not in _codes:
            others = [each.place for each in _codes.values() if each.name == name]
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
        if one.things is None:
            one.things = _run(one)
        try:
            for registry, name, thing in one.things:
                registry.add(name, thing)
        except ValueError as error:
            _withdraw(one)
            told = "Other code of this process has brought it; use this in another process."
            raise InputError(f"{one.place}: {error} {told}") from None
        one.in_use, one.stays = True, stays or one.stays


def _withdraw(code: Code) -> None:
    for registry, name, thing in code.things or ():
        if registry.get(name) is thing:
            del registry[name]
    code.in_use = code.stays = False


def is_in_use(code: object) -> bool:
    """Whether all names that this code brings are known."""
    return isinstance(code, Mapping) and all(sha in _codes and _codes[sha].in_use for sha in code.values())


@contextmanager
def names_of(code: object) -> Iterator[None]:
    """Take any name in this block if the code that may bring it is not in use, as for readers of a study."""
    token = _takes_unknown.set(not is_in_use(code))
    try:
        yield
    finally:
        _takes_unknown.reset(token)


def code_in_use(code: Mapping[str, str], classes: Iterable[str] = ()) -> list[Code]:
    """Where the code of a study lies on this machine, and what it holds; then its `classes` by name."""
    files = [_codes[sha] for sha in code.values() if sha in _codes]
    return files + [Code(name, name, {}) for name in classes]


def trusting(code: Mapping[str, str], classes: Iterable[str] = ()) -> list[str]:
    """The options with which another process of this machine may run the code and the classes too."""
    return [word for each in code_in_use(code, classes) for word in ("--trust-code", each.place)]


def _run(code: Code) -> list[_Thing]:
    """Run the code and return what it has added. Raises InputError with the line where it fails."""
    before = [(registry, dict(registry)) for registry in _registries]
    private = f"hpo_code_{code.sha256[:16]}"
    try:
        if code.is_file:
            spec = spec_from_file_location(private, code.place)
            assert spec is not None
            module = sys.modules[private] = module_from_spec(spec)
            exec(compile(code.files[code.place], code.place, "exec"), module.__dict__)
        else:
            import_module(code.place)
    except (Exception, SystemExit) as error:
        sys.modules.pop(private, None)
        for registry, content in before:
            registry.clear()
            registry.update(content)
        raise InputError(f"{_where([code], error) or code.place}: {_told(error)}") from error
    return [
        (registry, name, thing)
        for registry, content in before
        for name, thing in registry.items()
        if name not in content
    ]


@contextmanager
def errors_of_code() -> Iterator[None]:
    """Raise InputError, which names the line, for an error of the code in this block but want of memory."""
    try:
        yield
    except Exception as error:
        is_told = isinstance(error, HpoError) or is_out_of_memory(error)
        if not is_told and (where := _where(_codes.values(), error)):
            raise InputError(f"{where}: {_told(error)}") from error
        raise


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _where(codes: Iterable[Code], error: BaseException) -> str | None:
    """The file and line of the codes that an error comes from."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        frames.append((str(error.filename), error.lineno))
    files = {file for code in codes for file in code.files}
    return next((f"{file}:{line}" for file, line in reversed(frames) if file in files), None)
