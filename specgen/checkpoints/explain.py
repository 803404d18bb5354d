"""What libraries raise while loading → one line that says what to do."""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Iterator
from pathlib import Path

from specgen.checkpoints.located import cache_folder, pickle_only
from specgen.errors import SpecgenError, UsageError


def disk_full(error: BaseException) -> bool:
    full = (errno.ENOSPC, errno.EDQUOT)
    # safetensors wraps the system's error into one of its own, and keeps of it only the text.
    return any(getattr(e, "errno", None) in full or "os error 28" in str(e) for e in _chain(error))


# Errors
@contextlib.contextmanager
def explain(checkpoint: str, folder: Path | None = None) -> Iterator[None]:
    """Turn what transformers, the hub, safetensors and tokenizers raise into a SpecgenError.

    Only library calls belong inside: every Exception is taken for the checkpoint's. folder: where its files
    are, so that a damaged one can be named.
    """
    try:
        yield
    except SpecgenError:
        raise
    except Exception as error:
        raise _explained(checkpoint, error, folder) from error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def out_of_memory(error: BaseException) -> bool:
    return (
        type(error).__name__ == "OutOfMemoryError"
        or isinstance(error, MemoryError)
        or any(hint in str(error) for hint in ("can't allocate memory", "not enough memory", "out of memory"))
    )


def _explained(checkpoint: str, error: Exception, folder: Path | None) -> SpecgenError:
    return (
        _disk_trouble(checkpoint, error)
        or _hub_trouble(checkpoint, error)
        or _file_trouble(checkpoint, error, folder)
        or _library_trouble(checkpoint, error)
    )


def _disk_trouble(checkpoint: str, error: Exception) -> SpecgenError | None:
    if not disk_full(error):
        return None
    from huggingface_hub import constants

    return SpecgenError(f"{checkpoint}: the disk is full (downloads go to {constants.HF_HUB_CACHE}).")


def _hub_trouble(checkpoint: str, error: Exception) -> SpecgenError | None:
    from huggingface_hub import constants, errors

    chain = list(_chain(error))

    def raised(*kinds: type[BaseException]) -> bool:
        return any(isinstance(e, kinds) for e in chain)

    status = next((e.response.status_code for e in chain if isinstance(e, errors.HfHubHTTPError)), None)
    refused = status in (401, 403) and not raised(errors.RepositoryNotFoundError)
    if raised(errors.GatedRepoError) or refused:
        return UsageError(
            f"{checkpoint}: the hub does not let you have it: it is gated, or your token is not valid. "
            "Ask for access on its page, then: hf auth login"
        )
    if raised(errors.RepositoryNotFoundError):
        return UsageError(
            f"{checkpoint}: no such folder here, and no such checkpoint on the hub. If it is private: hf auth login"
        )
    if raised(errors.RevisionNotFoundError):
        return UsageError(f"{checkpoint}: the hub has no such revision of it.")
    if raised(errors.OfflineModeIsEnabled):
        why = "HF_HUB_OFFLINE is set, so the hub was not asked"
    elif raised(errors.LocalEntryNotFoundError, ConnectionError) or _is_network(chain):
        # The innermost error of the network says most: "Name or service not known".
        why = f"the hub could not be reached ({_first_line(chain[-1])})"
    elif status is not None:
        why = f"the hub answered with status {status}"
    else:
        return None
    return SpecgenError(
        f"{checkpoint}: no such folder, not (completely) in the cache {constants.HF_HUB_CACHE}, and {why}."
    )


def _is_network(chain: list[BaseException]) -> bool:
    """httpx and its successors by name: which of them the hub's client uses depends on its version."""
    names = {base.__name__ for e in chain for base in type(e).__mro__}
    return bool(names & {"TransportError", "ConnectError", "TimeoutException", "ProxyError"})


def _file_trouble(checkpoint: str, error: Exception, folder: Path | None) -> SpecgenError | None:
    text = str(error)
    kinds = {type(e).__name__ for e in _chain(error)}
    if kinds & {"SafetensorError", "JSONDecodeError"} or "not a valid JSON" in text:
        bad = _damaged(folder)
        what = bad or "one of its files"
        why = _first_line(error)
        ours = folder is not None and folder.parent == cache_folder()
        cure = "Run specgen cache clear: it will be converted again." if ours else "Fetch it again."
        return SpecgenError(f"{checkpoint}: {what} is truncated or damaged ({why}). {cure}")
    if "safetensors" in text and ("no file named" in text or "does not appear to have a file" in text):
        return UsageError(pickle_only(checkpoint, "or none at all"))
    if "no file named" in text or "does not appear to have a file" in text:
        return UsageError(f"{checkpoint}: {_first_line(error)}")
    if "backend tokenizer" in text:
        return UsageError(f"{checkpoint}: no tokenizer there (such as tokenizer.json){_at(folder)}.")
    return None


def _library_trouble(checkpoint: str, error: Exception) -> SpecgenError:
    text = str(error)
    if "trust_remote_code" in text:
        return UsageError(
            f"{checkpoint}: it comes with Python code of its own, which is not run unless asked for. "
            "If you have read it and trust it: trust_remote_code: true in the profile."
        )
    if "does not recognize this architecture" in text or "Unrecognized model" in text:
        kind = text.partition("model type `")[2].partition("`")[0]
        named = f" ({kind})" if kind else ""
        return UsageError(
            f"{checkpoint}: its architecture{named} is unknown to transformers {_transformers_version()}; "
            "a newer release may know it."
        )
    if "for this kind of AutoModel" in text:
        return UsageError(f"{checkpoint}: it is not a causal language model ({_first_line(error)})")
    if "ignore_mismatched_sizes" in text:
        return SpecgenError(f"{checkpoint}: its weights have other shapes than its config.json says.")
    # The text of a KeyError or an AttributeError says little without its name.
    plain = isinstance(error, OSError | ValueError | RuntimeError | ImportError)
    name = "" if plain else f"{type(error).__name__}: "
    return SpecgenError(f"{checkpoint}: cannot be loaded: {name}{_first_line(error)}")


def _transformers_version() -> str:
    import transformers

    return str(transformers.__version__)


def _at(folder: Path | None) -> str:
    return f" in {folder}" if folder else ""


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].strip().rstrip(".")[:200]


def _damaged(folder: Path | None) -> Path | None:
    """The first file of a folder that cannot be read as what it is called."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.iterdir()) if folder else ():
        try:
            if file.suffix == ".json":
                json.loads(file.read_text(encoding="utf-8"))
            elif file.suffix == ".safetensors":
                with safe_open(file, "pt"):
                    pass
        except (SafetensorError, OSError, ValueError):
            return file
    return None


def size_text(count: int) -> str:
    """Bytes in words, by thousands."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"
