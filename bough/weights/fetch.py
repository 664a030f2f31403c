"""From what the user names to files on this machine.

Nothing is the embedded default model; a path is itself; ``owner/name`` is a repository of the hub that
``HF_ENDPOINT`` points to, kept in the hub's own cache (``HF_HOME``) and used from there when
``HF_HUB_OFFLINE`` is set or the hub cannot be reached. Only configuration, tokenizer files and weights that
cannot run code are ever downloaded.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from bough.base.errors import ConfigError
from bough.weights.embedded import DEFAULT, default_model

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<file>[\w./-]+\.gguf))?")

_WANTED = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt"]
# Other copies of the same weights, in folders (onnx/, original/) or in Mistral's own layout.
_UNWANTED = ["*/*", "consolidated*"]

# The quantisation to take, best first, if a repository has nothing but GGUF files and none was named.
_PREFERRED = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_1", "Q4_0", "BF16", "F16", "F32")


def resolve(model: str | None, revision: str | None = None) -> Path:
    """Files of ``model``: a GGUF file or a folder; ConfigError that says what to do if there are none.

    Args:
        model: None for the default model, a path, ``owner/name``, or ``owner/name:file.gguf``.
        revision: branch, tag or commit of a hub repository; None for its main branch.
    """
    if (path := present(model)) is not None:
        return path
    if model is None:
        return default_model()
    match = _HUB_ID.fullmatch(model)
    if match is None or match["repo"].endswith((".gguf", ".safetensors")) or model.startswith("."):
        raise ConfigError(
            f"there is no file or folder {model!r}; a model of the hub is named owner/name or owner/name:file.gguf"
        )
    return _from_hub(match["repo"], match["file"], revision)


def present(model: str | None) -> Path | None:
    """Files of ``model`` where they are on this machine and no hub has to be asked which they are."""
    if model is None:
        return default_model() if DEFAULT.present else None
    path = Path(os.path.expanduser(model))
    return path if model and path.exists() else None


def _from_hub(repo: str, file: str | None, revision: str | None) -> Path:
    # Importing the hub client takes a good part of a second: only those who need it pay.
    from huggingface_hub import errors

    try:
        if file is not None:
            return _one_file(repo, file, revision)
        return _snapshot(repo, revision)
    except ConfigError:
        raise
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{repo} is gated: accept its terms on the hub's page of the model, then log in with 'hf auth login' "
            "or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"the hub has no model {repo}, or it is private: check the name, or log in with 'hf auth login' "
            "or set HF_TOKEN. A local folder must exist under the path as given"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(f"{repo} has no revision {revision!r} on the hub") from error
    except errors.LocalEntryNotFoundError as error:
        raise ConfigError(_absent(repo, error)) from error
    except errors.EntryNotFoundError as error:
        raise ConfigError(f"{repo} has no file {file!r} on the hub") from error
    # The client lets errors of its HTTP library, of the disk and of its own checks through; all of them
    # mean that there is no model to serve.
    except Exception as error:
        raise ConfigError(f"cannot fetch {repo} from the hub: {type(error).__name__}: {error}") from error


def _absent(repo: str, error: Exception) -> str:
    """Why a model that is not in the hub's cache could not be fetched."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return (
            f"{repo} is not in the hub's cache ({constants.HF_HUB_CACHE}) and HF_HUB_OFFLINE is set: "
            "unset it to download the model, or pass a local file or folder"
        )
    return (
        f"{repo} is not in the hub's cache ({constants.HF_HUB_CACHE}) and {constants.ENDPOINT} cannot be used: "
        f"check the network or HF_ENDPOINT, or pass a local file or folder. {error}"
    )


def _one_file(repo: str, file: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repo, file, revision=revision))


def _snapshot(repo: str, revision: str | None) -> Path:
    """The folder of a repository with safetensors, or a GGUF file of one without."""
    from huggingface_hub import snapshot_download

    folder = Path(snapshot_download(repo, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    if any(folder.glob("*.safetensors")):
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{repo} has safetensors but no config.json, so it is not a model that can be served")
        return folder
    return _one_file(repo, _choose_gguf(repo, _listing(repo, revision, folder)), revision)


def _listing(repo: str, revision: str | None, folder: Path) -> list[str]:
    """Names of a repository's files; without the hub, those GGUF files that an earlier call left in ``folder``."""
    from huggingface_hub import HfApi

    try:
        return HfApi().list_repo_files(repo, revision=revision)
    except Exception:
        cached = [path.name for path in folder.glob("*.gguf")]
        if not cached:
            raise
        return cached


def _choose_gguf(repo: str, names: list[str]) -> str:
    """The GGUF file of a repository to take; ConfigError if there is none or the choice is the user's."""
    found = sorted(name for name in names if name.endswith(".gguf") and "mmproj" not in name)
    if len(found) == 1:
        return found[0]
    for kind in _PREFERRED:
        # The kind stands at the end of the name: model.Q8_0.gguf or model-q8_0.gguf.
        matching = [name for name in found if re.search(rf"[.-]{kind}\.gguf$", name, re.IGNORECASE)]
        if len(matching) == 1:
            return matching[0]
    if found:
        raise ConfigError(f"{repo} has {len(found)} GGUF files; name one, such as {repo}:{found[0]}")
    from bough.weights.safetensors import refusal  # slow to import, with torch

    raise ConfigError(f"{repo} has no weights that can be served. {refusal(names)}")
