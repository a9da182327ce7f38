"""Models of the Hugging Face hub: downloaded once, from then on read from the cache without the hub.

So all trials of a study start from the same weights, a worker needs no network, and a name that is
neither cached nor in reach fails at once and not after minutes of retries.
"""

from __future__ import annotations

import fnmatch
import logging
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache

from hpo.errors import ModelError, shorten
from hpo.models.model_folder import has_tokenizer_and_weights

TIMEOUT_SECONDS = 10.0
_logger = logging.getLogger("hpo.models")
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")


def download(name: str, revision: str | None = None) -> Path:
    """Return the folder with the model's config, tokenizer and weights, fetched if it is not cached.

    Raises ModelError where the hub is out of reach or does not give the model.
    """
    try:
        config = try_to_load_from_cache(name, "config.json", revision=revision)
        if isinstance(config, str) and has_tokenizer_and_weights(Path(config).parent):
            return Path(config).parent
        # One question with a short timeout: transformers would retry each of several files for 20 s.
        info = HfApi().model_info(name, revision=revision, timeout=TIMEOUT_SECONDS)
        _logger.info("downloading the encoder %s", name)
        # One set of weights: repositories often hold them in five formats.
        top = [file.rfilename for file in info.siblings or () if "/" not in file.rfilename]
        weights = next((pattern for pattern in _WEIGHTS if fnmatch.filter(top, pattern)), _WEIGHTS[0])
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=["*.json", "*.txt", "*.model", "*.py", weights],
                ignore_patterns="*/*",
                etag_timeout=TIMEOUT_SECONDS,
            )
        )
    except Exception as error:
        raise ModelError(
            f"encoder: `{name}` is no folder here and not in the Hugging Face cache, and the hub does not "
            f"give it: {shorten(str(error), 300)} Check the name, `model.revision`, HF_TOKEN and the "
            "network, or name a local folder or `minilm`."
        ) from error
