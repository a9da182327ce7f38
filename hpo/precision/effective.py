"""The precision of a model's products, observed at the operators of a real pass, forward and backward.

A dispatch mode sees each operator below autograd and autocast, with the dtypes that it really gets. Operators
that call others, such as the fast path of `nn.TransformerEncoder`, are opened: the mode sees the inner ones.

- Products with weights are measured (`hpo.precision.planted`), since dtypes and flags are no proof. Weights
  are parameters, buffers, tensors among the attributes of modules, and tensors made of them, such as casts,
  views and decoded matrices (`hpo.precision.origins`). If a weight is cast to a narrower dtype and back, the
  narrower one counts. Storage does not count: a matrix in int8 is decoded and multiplied in fp32 or bf16.
- Of products without weights, such as attention scores and gradients of weights, the dtypes count. In a
  backward pass they have the name of the trained weight, otherwise that of the module. If one operator casts
  its inputs up and multiplies them, their dtype counts: without a fused kernel, PyTorch's attention computes
  fp16 and bf16 in fp32, for accuracy.
- A matrix without an operator but views and casts, or with a gradient and no operator, was multiplied where
  the mode sees nothing: in another thread or in NumPy. It is unverified.

Outer products add nothing up, and do not count. Products of the loss, outside of all modules, may be wider
than the precision. The compiler hides the operators, so `hpo.precision.compiled` measures a compiled model.
"""

from __future__ import annotations

import contextlib
import operator
import re
import sys
import threading
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpo.precision.amp import MixedPrecision, tf32_is_on
from hpo.precision.conditions import unchanged
from hpo.precision.float8 import float8_facts, float8_weights
from hpo.precision.observation import COMPILED, LOSS, Agreement, Observation
from hpo.precision.origins import (
    UNMEASURED,
    WIDEST_FIRST,
    Origins,
    Weight,
    format_of,
    narrower,
    storage,
    strided,
)
from hpo.precision.parts import float32_modules, float32_weights
from hpo.precision.planted import Call
from hpo.random_numbers import same_random_numbers

_COPY = re.compile(r"^(_to_copy|copy|clone|contiguous|detach|alias|lift_fresh)$|^new_|_like$")
_VIEW_NODE = re.compile(r"^(T|ToCopy|Transpose|View|UnsafeView|Permute|Expand|Clone|Squeeze)Backward")
"""Nodes of autograd between a weight and its product."""
_CAST_OR_FACTOR = re.compile(r"^(_to_copy|clone|mul|div)$")
_INTERNAL = (__file__, torch._compile.__file__, torch._dynamo.eval_frame.__file__)


def observe_model(
    model: nn.Module, amp: MixedPrecision, call: Callable[[Any], object], seen: Observation | None = None
) -> Observation:
    """Observe the eager model in training, forward and backward, and in evaluation.

    `call` calls the model and returns its outputs or its loss. The model comes back without gradients. The
    products are added to `seen`; None: to a new observation.
    """
    with unchanged(model), same_random_numbers(), observe(model, seen) as seen:
        with amp.autocast():
            outputs = call(model.train())
        leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if leaves:
            torch.autograd.backward([leaf.float().sum() for leaf in leaves])
        with amp.evaluation():
            call(model.eval())
    model.zero_grad(set_to_none=True)
    return seen


@contextlib.contextmanager
def observe(
    model: nn.Module, seen: Observation | None = None, *, in_call: bool = False
) -> Iterator[Observation]:
    """Observe every product of `model` inside the block, also of backward passes.

    The products are added to `seen`; None: to a new observation. Only extra calls of single operators are
    made, and the random number generators stay as they are. `in_call`: the block is in a call of the model.
    """
    seen = seen or Observation()
    seen.float8, seen.float8_weights = float8_facts(model), frozenset(float8_weights(model))
    seen.float32_weights, seen.float32_modules = float32_weights(model), frozenset(float32_modules(model))
    seen.tf32 = tf32_is_on() if any(parameter.is_cuda for parameter in model.parameters()) else None
    seen.compiled = Agreement(None, COMPILED) if compiled_modules(model) else None
    torch.clear_autocast_cache()  # it may hold casts whose origins nobody has followed
    # The operators of parts compiled by the model itself are visible only if these run eagerly.
    products = _Products(model, seen)
    with torch.compiler.set_stance("force_eager"), products.following(in_call):
        yield seen
        products.end()


def compiled_modules(model: nn.Module) -> list[str]:
    """Return the names of compiled modules. "" is the model itself."""
    named = model.named_modules()  # a wrapper of `torch.compile` has `_orig_mod`
    return [name for name, each in named if each._compiled_call_impl or "_orig_mod" in each._modules]


def _site() -> object:
    """Return the running instruction of Python, or hpo's attention. It may call many operators."""
    frame: Any = sys._getframe(1)
    while frame and frame.f_code.co_filename in _INTERNAL:
        frame = frame.f_back
    return frame and (id(frame), "CASTS_INPUTS_UP" in frame.f_globals or frame.f_lasti)


class _Products(TorchDispatchMode):
    """Follows the weights from operator to operator, and notes the products."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, seen: Observation) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.seen = model, seen
        self.origins = Origins(model)
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.modules = {id(module): name or type(model).__name__ for name, module in model.named_modules()}
        self.places = threading.local()
        self.place_of_node: dict[int, tuple[tuple[str, ...], str]] = {}
        """{sequence number of a node of autograd: the place of its forward product}."""
        self.cast_up: dict[Any, tuple[object, str]] = {}
        """{storage of a tensor cast to a wider dtype: where, and its narrower format}."""
        self.multiplied: set[str] = set()
        """Weights with products in a forward pass."""
        self.used: set[str] = set()
        """Weights in other operators than products, views and copies."""
        self.touched: set[str] = set()
        """Weights in any operator of a forward pass."""
        self.has_backward = False
        self.num_products = 0

    @contextlib.contextmanager
    def following(self, in_call: bool) -> Iterator[None]:
        """Follow the calls of modules in the block."""
        self._inside.extend([id(self.model)] * in_call)
        with contextlib.ExitStack() as hooks:
            if self.seen.compiled is None:  # a compiled module would warn
                hooks.callback(register_module_forward_pre_hook(self._enter).remove)
                hooks.callback(register_module_forward_hook(self._leave, always_call=True).remove)
            with self:
                yield

    def _enter(self, module: nn.Module, *_: object) -> None:
        self._inside.append(id(module))

    def _leave(self, module: nn.Module, *_: object) -> None:
        if self._inside[-1:] == [id(module)]:  # others were called before the block
            self._inside.pop()

    @property
    def _inside(self) -> list[Any]:
        """The modules that this thread is in, the innermost last."""
        modules: list[Any] = self.places.__dict__.setdefault("modules", [])
        return modules

    @property
    def is_backward(self) -> bool:
        return bool(torch._C._current_graph_task_id() != -1)

    def _place(self, factors: list[Tensor]) -> tuple[tuple[str, ...], str]:
        """Return the modules of a product (of its forward product), and its inputs' format before casts."""
        node = torch._C._current_autograd_node() if self.is_backward else None
        if node and not self._inside:
            return self.place_of_node.get(node._sequence_nr(), ((), WIDEST_FIRST[0]))
        modules = tuple(self.modules[each] for each in self._inside if each in self.modules)
        site, casts = _site(), [self.cast_up.get(storage(tensor), (0, "")) for tensor in factors[:2]]
        kinds = [kind for cast_at, kind in casts if cast_at == site]
        place = modules, reduce(narrower, kinds, WIDEST_FIRST[0])
        self.place_of_node[torch._C._autograd._get_sequence_nr() - 1] = place
        return place

    def _follow_casts(self, call: Call, outputs: list[Tensor]) -> None:
        """Follow casts to a wider dtype, through copies and factors."""
        data = [tensor for tensor in call.inputs if tensor.dim()]
        for tensor in outputs if len(data) == 1 and data[0].is_floating_point() else ():
            source = self.cast_up.get(storage(data[0]))
            if format_of(tensor) != format_of(data[0]):
                source = _site(), format_of(data[0])
            if source:
                self.cast_up[storage(tensor)] = source

    def end(self) -> None:
        """Note the matrices without a product that was seen."""
        for name, weight in self.model.named_parameters():
            is_matrix = weight.is_floating_point() and sum(size > 1 for size in weight.shape) > 1
            is_trained = self.has_backward and weight.grad is not None
            if is_matrix and (is_trained or name in self.touched) and name not in self.multiplied | self.used:
                self.seen.unseen.add(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if set(types) - {Tensor, nn.Parameter}:
            return NotImplemented  # a tensor made of others: its inner operators are dispatched next
        call = Call(func, args, kwargs or {})
        self.has_backward |= self.is_backward
        data = self._data(call) if call.is_product else None
        if call.calls_others:
            num_before = self.num_products
            before, self.multiplied = self.multiplied, set()
            result = self._open(call)
            hidden = dict.fromkeys(self._weights(call.factors) - self.multiplied, UNMEASURED)
            self.multiplied |= before
            is_other_library = not func.name().startswith("aten::")
            if data is not None and is_other_library and (hidden or self.num_products == num_before):
                self._note(call, hidden, result)
        else:
            formats = {} if data is None else self._measured(call, data)
            result = func(*args, **(kwargs or {}))
            if data is not None:
                self._note(call, formats, result)
        outputs = strided(result)
        if not self.is_backward and not call.calls_others:
            self._note_use(call, data is not None)
        if _CAST_OR_FACTOR.search(call.name):
            self._follow_casts(call, outputs)
        if not call.has_nested:  # these are data
            self.origins.follow(call.name, call.inputs, outputs, call.written, data is not None)
        return result

    def _open(self, call: Call) -> Any:
        """Run an operator that calls others, and see these. They run under the autocast of its caller."""
        keys = reduce(operator.or_, map(torch._C._dispatch_keys, call.tensors))
        with enable_reentrant_dispatch():
            devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
        with contextlib.ExitStack() as undo:
            for device in devices:
                torch.set_autocast_enabled(device, True)
                undo.callback(torch.set_autocast_enabled, device, False)
            undo.enter_context(self)
            below_autograd = keys & torch._C._after_ADInplaceOrView_keyset
            return call.func.redispatch(below_autograd, *call.args, **call.kwargs)

    def _weight(self, tensor: Tensor) -> Weight | None:
        key = storage(tensor)
        return self.origins.weights.get(key) or self.origins.constants.get(key)

    def _weights(self, tensors: list[Tensor]) -> set[str]:
        return {weight.name for tensor in tensors if (weight := self._weight(tensor))}

    def _data(self, call: Call) -> list[Tensor] | None:
        """Return the data among the factors of a product; None: the call is none.

        Weights alone make another weight, as for a spectral norm; but two matrices are also multiplied.
        """
        keys = {storage(tensor): tensor for tensor in call.factors if tensor.is_floating_point()}
        data = [tensor for key, tensor in keys.items() if not self.origins.is_fixed(key)]
        if not data and not (call.is_known and call.factors and all(each.dim() > 1 for each in call.factors)):
            return None
        return data

    def _measured(self, call: Call, data: list[Tensor]) -> dict[str, str]:
        """Return the formats of the weights of a product by name."""
        formats: dict[str, str] = {}
        for tensor in call.factors if call.has_numbers else ():
            if weight := self._weight(tensor):
                key = call.key(tensor)
                if weight.narrowest != UNMEASURED and key not in self.seen.kernels:
                    self.seen.kernels[key] = call.measure(tensor, data)
                kind = narrower(weight.narrowest, self.seen.kernels.get(key, UNMEASURED))
                formats[weight.name] = narrower(kind, formats.get(weight.name, kind))
        return formats

    def _note(self, call: Call, formats: dict[str, str], result: Any) -> None:
        """Note a product: with weights by their formats, without by its dtypes."""
        if not call.has_numbers:
            return
        modules, attention = self._place(call.factors)
        self.num_products += 1
        trained = self._trained_weight() if self.is_backward else None
        if call.is_outer and not (trained or formats.keys() & self.names.values()):
            return
        flops = call.flops(result)
        in_part = not self.seen.float32_modules.isdisjoint(modules)
        measured = formats
        if self.is_backward:  # its kernels may refuse other weights
            measured = {name: kind for name, kind in formats.items() if kind != UNMEASURED}
            trained = trained or next(iter(formats), None)
        else:
            self.multiplied.update(formats)
        for name, kind in measured.items():
            self._add(self.seen.products, name, kind, kind, flops / len(measured), in_part)
        if not measured and call.declared != UNMEASURED and call.is_named_product:
            name = trained or (modules[-1] if modules else LOSS)
            kind = call.declared if in_part else narrower(call.declared, attention)
            self._add(self.seen.others, name, kind, call.declared, flops, in_part)

    def _add(
        self, to: dict[str, set[str]], name: str, kind: str, computed: str, flops: float, in_part: bool
    ) -> None:
        self.seen.flops["backward" if self.is_backward else "forward", name, computed] += flops
        is_part = name in self.seen.float32_weights or name in self.seen.float32_modules
        if in_part and not is_part and kind == "float32":
            self.seen.shared_weights.add(name)
        else:
            to[name].add(kind)

    def _trained_weight(self) -> str | None:
        """Return the matrix among the inputs of the node that autograd runs, through views and casts."""
        nodes: list[Any] = [torch._C._current_autograd_node()]
        for node in filter(None, nodes):
            weight = getattr(node, "variable", None)
            if weight is not None and id(weight) in self.names and weight.dim() > 1:
                return self.names[id(weight)]
            if len(nodes) == 1 or _VIEW_NODE.match(node.name()):
                nodes += [each for each, _ in node.next_functions]
        return None

    def _note_use(self, call: Call, is_product: bool) -> None:
        """Note the use of weights in a forward pass, which is more than a view or a copy."""
        weights = {one.name for tensor in call.inputs if (one := self.origins.weights.get(storage(tensor)))}
        self.touched |= weights
        is_copy = getattr(call.func, "is_view", False) or _COPY.search(call.name)
        # Outside of modules, a regulariser reads weights alone.
        has_data = any(self._weight(tensor) is None for tensor in call.inputs)
        if is_product or (not is_copy and (has_data or self._inside)):
            self.used |= weights
