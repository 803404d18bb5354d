"""Profile → a session: target, drafter, tokenizer and effective settings. Pairs are checked before weights load."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specgen.checkpoints.chat import prompt_notes, prompt_tokens, tokenizer_notes
from specgen.checkpoints.dtype import settle
from specgen.checkpoints.load import end_tokens, generation_defaults, load_config, load_tokenizer, load_weights
from specgen.checkpoints.locate import locate, locate_settings
from specgen.checkpoints.located import Located
from specgen.checkpoints.vocabulary import Vocabulary, compare_tokenizers, vocabulary_of
from specgen.decoding.generation import Generation
from specgen.decoding.pair import Hold, Pair
from specgen.drafting.drafter import Drafter, Ingredients
from specgen.drafting.make import make_drafter
from specgen.errors import UsageError
from specgen.machine.clocks import clock_for
from specgen.machine.devices import pick_device, settle_threads
from specgen.machine.environment import describe
from specgen.models.causal import CausalLM
from specgen.models.engines import prepare
from specgen.models.rope import rope_constant_up_to
from specgen.profiles.effective import merged_settings, resolve_sampling
from specgen.profiles.read import DEFAULT_PROFILE
from specgen.profiles.read import load_profile as read_profile
from specgen.profiles.schema import SHARED_FLAGS, CheckpointSettings, Profile
from specgen.results.document import plain_data
from specgen.results.files import SCHEMA_VERSION
from specgen.sampling.processors import Processors
from specgen.settings import Sampling


@dataclass(frozen=True)
class Session:
    """A loaded pair. `notes` are things the user should know (rows masked, tokens one side lacks)."""

    profile: Profile
    pair: Pair
    located: dict[str, Located]
    context: int | None
    notes: tuple[str, ...] = ()
    both_hold: int | None = None

    @property
    def sampling(self) -> Sampling:
        return self.pair.sampling

    def encode(self, prompt: str) -> list[int]:
        """Token ids of the prompt, through the chat template where the profile and the tokenizer say so.

        Raises UsageError for an empty prompt, a missing template, a token without a row, or more than the context
        holds.
        """
        if not prompt.strip():
            raise UsageError("the prompt is empty")
        target = self.profile.target
        tokens = prompt_tokens(
            self.pair.tokenizer, self.profile.prompt, target.tokenizer or target.checkpoint, prompt
        )
        if not tokens:
            raise UsageError("the prompt holds no token of the target's")
        self.check_rows(tokens)
        self._check_room(len(tokens))
        return tokens

    def notes_of(self, prompt: str, tokens: list[int]) -> list[str]:
        """What the user should know of how this prompt is read; tokens: what `encode` made of it."""
        notes = prompt_notes(self.pair.tokenizer, self.profile.prompt, prompt, tokens)
        wanted = len(tokens) + self.sampling.max_new_tokens
        if self.both_hold is not None and wanted > self.both_hold and self.both_hold != self.context:
            notes.append(f"the draft holds {self.both_hold} tokens: behind them the target goes on without it")
        return notes

    def check_rows(self, tokens: Sequence[int]) -> None:
        """Raises UsageError naming the first token that the target has no row of embeddings for."""
        vocabulary, tokenizer = self.pair.target.vocabulary, self.pair.tokenizer
        for token in tokens:
            if token >= vocabulary:
                spelled = () if tokenizer is None else tokenizer.get_vocab().items()
                name = next((f" {text!r}" for text, i in spelled if i == token), "")
                raise UsageError(
                    f"the prompt holds the token{name} with the id {token}, for which the target has no row: its ids "
                    f"go from 0 to {vocabulary - 1}"
                )

    def _check_room(self, prompt_tokens: int) -> None:
        wanted = prompt_tokens + self.sampling.max_new_tokens
        if self.context is not None and wanted > self.context:
            raise UsageError(
                f"the prompt has {prompt_tokens} tokens, and with --max-new-tokens {self.sampling.max_new_tokens} "
                f"that makes {wanted}: more than the context of {self.context} tokens{self._why_no_more()}"
            )

    def _why_no_more(self) -> str:
        target = self.pair.target
        if isinstance(target, CausalLM) and rope_constant_up_to(target.model.config) == self.context:
            return ", beyond which the target's rotary embedding changes"
        return ""

    def generate(self, prompt: str | Sequence[int], *, plain: bool = False, timed: bool = True) -> Generation:
        """A generation to iterate over. plain: decode without the draft. Other than a text are token ids.

        timed: whether its rounds are; else no clock is read. Raises UsageError, also for more than the context holds.
        """
        tokens = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not tokens or not all(type(t) is int and t >= 0 for t in tokens):
            most = self.pair.target.vocabulary - 1
            raise UsageError(f"a prompt needs token ids from 0 to {most}, and at least one")
        self.check_rows(tokens)
        self._check_room(len(tokens))
        if not plain and self.pair.drafter is None:
            raise UsageError(f"profile {self.profile.name} has no draft: add one, or decode with --plain")
        return Generation(self.pair, tokens, plain=plain, timed=timed)


def load(profile: str | Profile = DEFAULT_PROFILE, *, plain: bool = False, **flags: Any) -> Session:
    """Loads a profile's pair. Keyword arguments are flags by dotted key with `__` for the dot, or plain sampling
    settings: `load("smollm2", k=2, temperature=0.8, target__dtype="float32")`. plain: leave the draft out.

    Raises UsageError and SpecgenError, whose text says what to do.
    """
    if isinstance(profile, str):
        profile = read_profile(profile, {_dotted(name): value for name, value in flags.items()})
    elif flags:
        raise TypeError("give settings together with a profile's name or path, not with a loaded profile")
    return load_session(profile, plain=plain)


def _dotted(name: str) -> str:
    if name in SHARED_FLAGS:
        return name
    return name.replace("__", ".") if "__" in name else f"decoding.{name}"


def load_session(
    profile: Profile, *, plain: bool = False, quiet: bool = False, share: Session | None = None
) -> Session:
    """As `load`, from a validated profile. quiet: no line about a conversion on stderr. share: a session whose
    target serves this one too, if it is the same with the same settings: its weights are loaded once."""
    settings, draft = profile.target, None if plain else profile.draft
    # 1. Locate both.
    located = {"target": locate_settings(settings, quiet=quiet)}
    if isinstance(draft, CheckpointSettings):
        located["draft"] = locate_settings(draft, quiet=quiet)
    # 2. Settle everything that needs no weights.
    device = _device(settings)
    settle_threads()
    tokenizer = _tokenizer(located["target"], settings, quiet)
    # A template's fault shows here; it may still refuse one prompt of many later.
    prompt_tokens(tokenizer, profile.prompt, settings.tokenizer or settings.checkpoint, "a")
    config = load_config(located["target"], settings.trust_remote_code)
    rows = int(config.get_text_config().vocab_size)
    if isinstance(draft, CheckpointSettings):
        draft_config = load_config(located["draft"], draft.trust_remote_code)
        vocabulary = compare_tokenizers(
            tokenizer,
            _tokenizer(located["draft"], draft, quiet),
            target_rows=rows,
            draft_rows=int(draft_config.get_text_config().vocab_size),
        )
        own_device = device if draft.device == "auto" else _device(draft)
    else:
        vocabulary, own_device = vocabulary_of(tokenizer, rows=rows), device
    sampling = _sampling(profile, located["target"], config, tokenizer, vocabulary)
    notes = [*_notes(rows, vocabulary), *tokenizer_notes(tokenizer, profile.prompt, sampling.end_tokens)]
    # 3. Load both.
    shared = _shares(share, settings, located["target"])
    target = shared.target if shared else _model(located["target"], settings, device, "target", vocabulary, notes)
    processors = _processors(sampling, vocabulary, target.device)
    drafter: Drafter | None = None
    if draft is not None:
        model, own = None, None
        if isinstance(draft, CheckpointSettings):
            model = _model(located["draft"], draft, own_device, "draft", vocabulary, notes)
            same = model.device == target.device  # one object then: the captured loop is for one
            own = processors if same else _processors(sampling, vocabulary, model.device)
        drafter = make_drafter(Ingredients(draft, target, processors, model, own))
    sides = [target] if drafter is None or drafter.model is None else [target, drafter.model]
    known = [side.context for side in sides if side.context is not None]
    hold = shared.hold if shared else Hold()  # one cache, one hold
    pair = Pair(target, drafter, processors, sampling, tokenizer, target.dtype, clock_for(device), hold)
    return Session(profile, pair, located, target.context, tuple(notes), min(known, default=None))


def _shares(share: Session | None, settings: CheckpointSettings, at: Located) -> Pair | None:
    """The other session's pair, where its target is this one and was loaded with these settings."""
    if share is None or share.profile.target != settings or share.located.get("target") != at:
        return None
    return share.pair


def _device(settings: CheckpointSettings) -> torch.device:
    try:
        return pick_device(settings.device)
    except ValueError as error:
        raise UsageError(f"{error}") from None


def _tokenizer(at: Located, settings: CheckpointSettings, quiet: bool) -> Any:
    if settings.tokenizer is not None:
        at = locate(settings.tokenizer, quiet=quiet)
    return load_tokenizer(at, settings.trust_remote_code)


def _model(
    at: Located,
    settings: CheckpointSettings,
    device: torch.device,
    role: str,
    vocabulary: Vocabulary,
    notes: list[str],
) -> CausalLM:
    """The model, ready for its engine; what the user should know of it is added to `notes`."""
    decision = settle(at, settings, device)
    if decision.note is not None:
        notes.append(f"the {role}'s dtype auto: {decision.note}")
    model = load_weights(
        at,
        dtype=decision.dtype,
        device=str(device),
        device_map=settings.device_map,
        attention=settings.attention,
        trust_remote_code=settings.trust_remote_code,
    )
    try:
        engine = prepare(model, settings.engine)
    except ValueError as error:
        raise UsageError(f"{role}: {error}") from None
    if (constant := rope_constant_up_to(model.config)) is not None:
        notes.append(
            f"the {role}'s rotary embedding changes beyond {constant} tokens, where what was cached before no longer "
            "fits: texts that would become longer are refused"
        )
    return CausalLM(model, role, vocabulary.size, engine=engine)


def _sampling(profile: Profile, at: Located, config: Any, tokenizer: Any, vocabulary: Vocabulary) -> Sampling:
    generation_config: Mapping[str, Any] = generation_defaults(at)
    decoding = profile.decoding
    if decoding.end_tokens is not None:
        ends = _token_ids(decoding.end_tokens, tokenizer, vocabulary, "end_tokens")
    else:
        ends = end_tokens(at, config, tokenizer)
    ban = _token_ids(decoding.ban, tokenizer, vocabulary, "ban")
    if len(set(ban)) >= vocabulary.size - len(vocabulary.unused):
        raise UsageError("--ban leaves no token to draw")
    return resolve_sampling(profile, generation_config, ban_ids=ban, end_tokens=ends)


def _token_ids(refs: Any, tokenizer: Any, vocabulary: Vocabulary, key: str) -> tuple[int, ...]:
    """Ids of token ids and strings. A string must be one token: by its text, or as the vocabulary spells it.
    (Numbers in strings are ids by now, see `profiles.schema`.)"""
    ids = []
    for ref in refs:
        found = [ref] if isinstance(ref, int) else tokenizer.encode(ref, add_special_tokens=False)
        if len(found) != 1:
            raise UsageError(
                f"decoding.{key}: {ref!r} is {len(found)} tokens {found}: name single tokens, or their ids"
            )
        if not 0 <= found[0] < vocabulary.size:
            raise UsageError(
                f"decoding.{key}: no token has the id {found[0]}; ids go from 0 to {vocabulary.size - 1}"
            )
        ids.append(found[0])
    return tuple(ids)


def _processors(sampling: Sampling, vocabulary: Vocabulary, device: torch.device) -> Processors:
    """Ids that no text contains, or that only the draft has, are masked on both sides. What a generation_config
    bans beyond the rows is not there to be drawn."""
    banned = {*sampling.ban, *vocabulary.unused, *vocabulary.missing_in_target}
    ban = tuple(sorted(i for i in banned if i < vocabulary.size))
    words = tuple(word for word in sampling.bad_words_ids if max(word, default=0) < vocabulary.size)
    return Processors.of(dataclasses.replace(sampling, ban=ban, bad_words_ids=words), device)


def _notes(rows: int, vocabulary: Vocabulary) -> tuple[str, ...]:
    notes = []
    hidden = rows - vocabulary.size + len(vocabulary.unused)
    if hidden > 0:
        notes.append(f"{hidden} rows of the target's vocabulary belong to no token: masked on both sides")
    if vocabulary.missing_in_draft:
        notes.append(
            f"the draft lacks {len(vocabulary.missing_in_draft)} of the target's tokens: it never proposes them"
        )
    return tuple(notes)


def head(session: Session) -> dict[str, Any]:
    """What every file of one session begins with (`results.document.Head`), its kind apart."""
    return {
        "schema_version": SCHEMA_VERSION,
        "profile": merged_settings(session.profile),
        "sampling": plain_data(session.sampling),
        "checkpoints": plain_data(session.located),
        "dtype": str(session.pair.dtype).removeprefix("torch."),
        "device": str(session.pair.target.device),
        "environment": describe(),
    }
