"""GGUF → safetensors, once, kept in the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specgen.checkpoints.explain import explain
from specgen.checkpoints.gguf import Account, Header
from specgen.checkpoints.load import call_from_pretrained
from specgen.checkpoints.located import INSTALL_GGUF, Located, cache_folder
from specgen.checkpoints.progress import alone
from specgen.checkpoints.store import STAMP, cache_lock, disk_errors, no_room, remove_leftovers
from specgen.errors import SpecgenError, UsageError

# Counts up whenever a conversion comes out differently, so that older conversions are not used again.
# 2: rotary scaling is applied; every tensor and key is accounted for.
CONVERSION = 2


# llama.cpp's rules "smollm" and the like: first every digit (\p{N}) stands alone, then GPT-2's expression.
DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})


# The rules for which GPT-2's expression alone, the library's fallback, is right.
GPT2_SPLIT = frozenset({"gpt-2", "gpt2", "mpt", "olmo", "jais", "trillion", "granite-docling"})


def converted_folder(checkpoint: str, file: Path, quiet: bool) -> Located:
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
    with disk_errors(checkpoint, cache_folder()):
        cache_folder().mkdir(parents=True, exist_ok=True)
        with cache_lock(cache_folder(), wait=True):
            if not (folder / STAMP).is_file():
                remove_leftovers(cache_folder())
                shutil.rmtree(folder, ignore_errors=True)
                _convert(checkpoint, file, folder, digest, quiet)
    return located


def _sha256(checkpoint: str, file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise SpecgenError(f"{checkpoint}: cannot be read: {error.strerror}.") from error


def _convert(checkpoint: str, file: Path, folder: Path, digest: str, quiet: bool) -> None:
    """Write `file` as a safetensors folder, whole or not at all: it takes its name when all is written.

    Weights are kept in float32. A Q4_1 weight is scale · q + minimum, with two float16 numbers and q in
    0 … 15: up to 15 significant bits before the sum, so neither float16 (11) nor bfloat16 (8) holds it; nor
    would they most other GGUF types.
    """
    facts = _gguf_facts(checkpoint, file)
    if shutil.disk_usage(folder.parent).free < facts.float32_bytes:
        raise SpecgenError(no_room(checkpoint, folder.parent, facts.float32_bytes))
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        with _working(f"converting {file.name}, once; this takes half a minute or more", quiet, 2) as advance:
            with explain(checkpoint):
                warning = _write_tokenizer(file, partial, facts)
                advance()
                account = Account(facts.header, checkpoint)
                _write_weights(file, partial, account)
                advance()
            # In place of the library's, which writes defaults as if the checkpoint had set them.
            (partial / "generation_config.json").write_text(json.dumps(facts.generation, indent=2) + "\n")
            stamp = {
                "source": str(file),
                "sha256": digest,
                "when": datetime.now(UTC).isoformat(timespec="seconds"),
                "conversion": CONVERSION,
                "applied": account.applied,
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

    header: Header
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
        header = Header.of(reader)
    except (ValueError, IndexError, KeyError, OSError, UnicodeDecodeError) as error:
        raise SpecgenError(f"{checkpoint}: {file} is truncated or damaged; download it again.") from error

    def value(key: str) -> Any:
        entry = reader.fields.get(f"tokenizer.ggml.{key}")
        return None if entry is None else entry.contents()

    # Chat models end a turn with eot where it differs from eos. The file says nothing else about generation.
    ends = sorted({int(e) for e in (value("eos_token_id"), value("eot_token_id")) if e is not None})
    generation = {"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {}
    elements = sum(int(tensor.n_elements) for tensor in reader.tensors)
    return _Facts(header, 4 * elements, value("pre") if value("model") == "gpt2" else None, generation)


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


def _write_weights(file: Path, folder: Path, account: Account) -> None:
    """Convert the weights. Raises UsageError where something of the file that changes the text would be left out."""
    import torch
    from transformers import AutoConfig

    source = str(file.parent)
    model = call_from_pretrained(source, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False)
    # A model loaded from GGUF counts as quantised and refuses to be saved, though its weights are plain now.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    account.apply(model.config)
    model.save_pretrained(folder)
    account.settle(model, AutoConfig.from_pretrained(folder, trust_remote_code=False))


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
    with alone(), bar, contextlib.redirect_stderr(io.StringIO()):
        yield lambda: bar.advance(task)
