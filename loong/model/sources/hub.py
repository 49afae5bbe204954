"""Models of the Hugging Face hub, by the hub's own client: it caches, resumes and shows progress.

The client heeds HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loong.core.errors import ConfigError
from loong.model.hugging_face import load_config

_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")
_SMALL_FILES = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "additional_chat_templates/*.jinja",
]  # fmt: skip
_WEIGHTS = ["model*.safetensors", "model.safetensors.index.json"]
_FOLDERS = "*/*"  # which hold the same weights in other formats


def is_hub_name(name: str) -> bool:
    """Return whether a text has the form of a model's name on the hub, ORG/NAME."""
    return _NAME.fullmatch(name) is not None


def fetch_from_hub(name: str, revision: str | None, *, has_weights: bool) -> Path:
    """Return a folder with a model's config, tokenizer and, if asked, weights; download what is missing.

    The config is read before weights are asked for, so that an unsupported model is refused early. Raises
    ConfigError saying what is missing, gated, or cannot be reached.
    """
    from huggingface_hub import snapshot_download  # slow to import

    with _errors_reported(name, revision):
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=_SMALL_FILES))
    if not (folder / "config.json").exists():
        hint = ""
        if "gguf" in name.lower():
            hint = "; to serve one of its GGUF files, fetch it (`hf download`) and name the file"
        raise ConfigError(f"{name} of the hub has no config.json{hint}")
    load_config(folder)
    if has_weights:
        with _errors_reported(name, revision):
            snapshot_download(name, revision=folder.name, allow_patterns=_WEIGHTS, ignore_patterns=[_FOLDERS])
        if not any(folder.glob("model*.safetensors")):
            raise ConfigError(f"{name} of the hub has no model.safetensors: no other format of it is read")
    return folder


@contextmanager
def _errors_reported(name: str, revision: str | None) -> Iterator[None]:
    """Raise what goes wrong as a ConfigError that says what to do."""
    from httpx2 import HTTPError
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        raise ConfigError(
            f"{name} is gated: ask for access at {constants.ENDPOINT}/{name}, and set HF_TOKEN to a token of "
            "yours"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"there is no folder {name} here and no such model on the hub ({constants.ENDPOINT}), or it is "
            "private and HF_TOKEN names nobody who may read it"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{name} of the hub has no revision {revision}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set"
        else:
            why = f"the hub ({constants.ENDPOINT}) cannot be reached"
        raise ConfigError(f"{name} is not wholly on this disk, and {why}") from error
    except HFValidationError as error:
        raise ConfigError(f"{name} is no name of the hub: {error}") from error
    except HfHubHTTPError as error:
        raise ConfigError(
            f"the hub ({constants.ENDPOINT}) refuses {name}: status {error.response.status_code}"
        ) from error
    except HTTPError as error:
        raise ConfigError(
            f"the hub ({constants.ENDPOINT}) broke off ({error}); what has come of {name} is kept; try again"
        ) from error
    except OSError as error:
        raise ConfigError(f"{name} cannot be fetched into {constants.HF_HUB_CACHE}: {error}") from error
