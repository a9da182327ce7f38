"""What families of encoders are known for under a precision, to be said before a search spends time on it.

By transformers' `model_type`. It decides nothing: some of it is mended in some release of transformers, or
needs weights that only some checkpoints have. The check measures; this says what to look for.
"""

from __future__ import annotations

from dataclasses import dataclass

_TRANSFORMERS = "https://github.com/huggingface/transformers/issues/"


@dataclass(frozen=True)
class KnownBreak:
    """`precisions` in which models of a family broke, with `attention` if it takes a certain one."""

    precisions: tuple[str, ...]
    what: str
    link: str
    attention: str | None = None


_REDUCED = ("bf16", "fp16", "bf16-true", "fp8")
_T5 = KnownBreak(("fp16",), "the feed-forward overflows before its last layer", f"{_TRANSFORMERS}9295")
_DEBERTA = (
    KnownBreak(
        ("fp16",),
        "attention scores overflow, and mDeBERTa-v3 does not learn",
        "https://github.com/microsoft/DeBERTa/issues/77",
    ),
    KnownBreak(
        ("bf16", "bf16-true", "fp8"),
        "disentangled attention failed or lost its scores",
        f"{_TRANSFORMERS}35332",
    ),
)
KNOWN_BREAKS: dict[str, tuple[KnownBreak, ...]] = {
    "t5": (_T5,),
    "mt5": (_T5,),
    "umt5": (_T5,),
    "longt5": (
        _T5,
        KnownBreak(("fp16",), "the residual of the feed-forward overflows", f"{_TRANSFORMERS}19229"),
    ),
    "deberta": _DEBERTA,
    "deberta-v2": _DEBERTA,
    "modernbert": (
        KnownBreak(_REDUCED, "NaN with flash attention where sdpa trains", f"{_TRANSFORMERS}35988", "flash"),
    ),
}


def known_breaks(model_type: str, precision: str, attention: str) -> list[str]:
    """A sentence for each."""
    return [
        f"{model_type} is known for this in {precision}: {each.what} ({each.link})."
        for each in KNOWN_BREAKS.get(model_type, ())
        if precision in each.precisions and each.attention in (None, attention)
    ]
