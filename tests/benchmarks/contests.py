"""The pairs that engine.py measures: as specgen runs them, and as transformers does, on the same weights.

Nothing here needs a network. What a bare machine may lack (pydantic, SmolLM2) is imported where it is needed.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers

from specgen.decoding.pair import Pair
from specgen.drafting.checkpoint import ModelDrafter
from specgen.machine.clocks import clock_for
from specgen.models.causal import CausalLM
from specgen.models.engines import prepare
from specgen.sampling.processors import Processors
from specgen.settings import Mode, Sampling
from support.tiny import noisy_copy, tiny_llama

TEMPERATURE = 0.8
DECODINGS = ("greedy", "sampled")
PROMPTS = (
    "Repeat after me, twice: the quick brown fox jumps over the lazy dog.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Why is the sky blue?",
    "List the planets of the solar system from the sun outward, with one fact about each of them.",
    "Write a short story about a lighthouse keeper who collects storms in bottles.",
    "Translate into French: the train to Lyon leaves at seven in the morning.",
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Contest:
    """One pair, as both sides see it.

    pairs: specgen's, by decoding. target, assistant: transformers' own models; the assistant is None where the draft
    is prompt lookup. They share specgen's weights only where no engine changes those. calls: whether the costs of
    the target's calls are worth measuring, which they are once for pairs that differ in agreement alone.
    """

    name: str
    kind: str
    pairs: dict[str, Pair]
    target: Any
    assistant: Any
    prompts: list[list[int]]
    calls: bool = True
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def facts(self) -> dict[str, Any]:
        pair = self.pairs["greedy"]
        drafter = pair.drafter
        assert isinstance(pair.target, CausalLM)
        assert drafter is not None
        draft = drafter.model if isinstance(drafter, ModelDrafter) else None
        return {
            "pair": self.name,
            "kind": self.kind,
            "draft": drafter.kind,
            "engine": pair.target.engine,
            "draft_engine": getattr(draft, "engine", None),
            "dtype": str(pair.dtype).removeprefix("torch."),
            "device": str(pair.target.device),
            "prompt_tokens": [len(p) for p in self.prompts],
            **self.notes,
        }


def with_decodings(
    name: str, pair: Pair, sampled: Sampling, prompts: list[list[int]], target: Any, assistant: Any, **more: Any
) -> Contest:
    """The contest of a pair, greedy and sampled. One processors object serves both of its sides, as graphs ask."""
    pairs = {}
    for decoding in DECODINGS:
        greedy = {"mode": Mode.GREEDY, "temperature": None} if decoding == "greedy" else {}
        sampling = replace(sampled, **greedy)
        processors = Processors.of(sampling, pair.target.device)  # type: ignore[attr-defined]
        drafter = pair.drafter
        if isinstance(drafter, ModelDrafter):
            drafter = ModelDrafter(drafter.model, processors)
        pairs[decoding] = replace(pair, drafter=drafter, sampling=sampling, processors=processors)
    return Contest(name, more.pop("kind", name), pairs, target, assistant, prompts, **more)


def packs_in_place(options: argparse.Namespace) -> bool:
    """Whether specgen's engine may change the weights it is given, so that transformers needs its own."""
    return options.device == "cpu" and options.engine in ("auto", "packed")


def both_sides(model: Any, role: str, options: argparse.Namespace) -> tuple[CausalLM, Any]:
    """A model for specgen, under the engine asked for, and for transformers."""
    other = copy.deepcopy(model) if packs_in_place(options) else model
    return CausalLM(model, role, engine=prepare(model, options.engine)), other


def made(name: str, target: Any, draft: Any, options: argparse.Namespace, prompt_tokens: int, **more: Any) -> Contest:
    """A contest of two models with random weights, with random prompts. Token 0 is what transformers calls an end:
    it is banned on both sides."""
    ours, theirs = both_sides(target, "target", options)
    drafting, assistant = both_sides(draft, "draft", options)
    for model in (theirs, assistant):
        model.generation_config.eos_token_id = model.generation_config.pad_token_id = 0
    sampled = Sampling(
        k=options.k, max_new_tokens=options.tokens, seed=options.seed, temperature=TEMPERATURE, ban=(0,)
    )
    processors = Processors.of(sampled, ours.device)
    clock = clock_for(ours.device)
    pair = Pair(ours, ModelDrafter(drafting, processors), processors, sampled, None, target.dtype, clock)
    drawn = random.Random(options.seed)
    prompts = [[drawn.randrange(1, ours.vocabulary) for _ in range(prompt_tokens)] for _ in range(options.prompts)]
    return with_decodings(name, pair, sampled, prompts, theirs, assistant, **more)


def from_profile(name: str, target: str, draft: dict[str, Any], options: argparse.Namespace) -> Contest:
    """A contest from checkpoints. The target's end tokens are banned and end nothing."""
    from specgen.profiles.schema import Profile
    from specgen.session import load_session

    settings = {"dtype": options.dtype or "float32", "device": options.device}

    def load(engine: str) -> Any:
        own = {**settings, "engine": engine}
        profile = {
            "name": name,
            "target": {"checkpoint": target, **own},
            "draft": {**draft, **own} if "checkpoint" in draft else draft,
            "decoding": {
                "k": options.k,
                "max_new_tokens": options.tokens,
                "seed": options.seed,
                "temperature": TEMPERATURE,
            },
        }
        return load_session(Profile.model_validate(profile))

    session = load(options.engine)
    other = load("eager") if packs_in_place(options) else session
    sampled = replace(session.sampling, ban=session.sampling.end_tokens, end_tokens=(), stop=())
    prompts = [session.encode(text) for text in PROMPTS[: options.prompts]]
    drafter = other.pair.drafter
    assistant = drafter.model.model if isinstance(drafter, ModelDrafter) else None
    return with_decodings(name, session.pair, sampled, prompts, other.pair.target.model, assistant)


def smollm2(options: argparse.Namespace) -> Iterator[Contest]:
    from support.stretched import SMOLLM2

    yield from_profile("smollm2", SMOLLM2, {"kind": "ngram"}, options)


def stretched_smollm2(options: argparse.Namespace) -> Iterator[Contest]:
    from support.stretched import FOR_BENCHMARKS, SMOLLM2, stretched

    draft = {"kind": "checkpoint", "checkpoint": SMOLLM2}
    yield from_profile("stretched", str(stretched(FOR_BENCHMARKS)), draft, options)


def tiny(options: argparse.Namespace) -> Iterator[Contest]:
    """Random weights and hardly any arithmetic: what is left is the two loops themselves."""
    model = tiny_llama(layers=4, hidden=64, vocab=512)
    draft = noisy_copy(model, 0.02)
    place = {"device": options.device, "dtype": DTYPES[options.dtype or "float32"]}
    yield made("tiny", model.to(**place), draft.to(**place), options, prompt_tokens=32)


@dataclass(frozen=True, slots=True)
class Size:
    """A Llama-shaped target; its first `draft_layers` layers, with its embeddings, norm and head, are the draft."""

    target: str
    draft: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    draft_layers: int

    def config(self, layers: int, positions: int = 8192) -> Any:
        return transformers.LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=positions,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )


SIZES = {
    "1b": Size("1B", "0.1B", 2048, 8192, 16, 32, 8, 32_000, draft_layers=1),
    "8b": Size("8B", "1B", 4096, 14_336, 32, 32, 8, 128_256, draft_layers=2),
}
SMALL = Size("small", "smaller", 64, 128, 4, 4, 2, 512, draft_layers=1)
LOGIT_SCALE = 4.0  # standard deviation of a row of logits: neither flat nor one-hot
FACTORS = (1e-3, 16.0)  # between which the damping is looked for
CLOSE = 0.01  # of the overlap asked for
STEPS = 12
OWN_PROMPTS, OWN_TOKENS = (8, 64), 48  # texts and tokens that the overlap is looked for on
TEXTS = 4  # times that they are written


def random_llama(size: Size, layers: int, dtype: torch.dtype, device: str, seed: int, positions: int = 8192) -> Any:
    """Made on the device itself. The caller's generators are kept."""
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(size.config(layers, positions), dtype=dtype)
        torch.nn.init.normal_(model.lm_head.weight, std=LOGIT_SCALE / math.sqrt(size.hidden))
    return model.eval().requires_grad_(False)


def first_layers(target: Any, size: Size, dtype: torch.dtype, device: str) -> Any:
    """The draft: a model of fewer layers whose weights are the target's own tensors."""
    draft = random_llama(size, size.draft_layers, dtype, device, 0)
    own = target.state_dict()
    draft.load_state_dict({name: own[name] for name in draft.state_dict()}, assign=True)
    return draft.eval().requires_grad_(False)


@torch.inference_mode()
def agreement(target: Any, draft: Any, tokens: torch.Tensor, first: int) -> float:
    """Mean overlap at temperature .8 at the positions from `first` on of texts [B, n]."""
    target_probs, draft_probs = (
        (model(input_ids=tokens, use_cache=False).logits[:, first - 1 : -1].float() / TEMPERATURE).softmax(-1)
        for model in (target, draft)
    )
    return float(torch.minimum(target_probs, draft_probs).sum(-1).mean())


class Damping:
    """What the layers behind the draft's add is scaled by one factor: at 0 target and draft would be the same."""

    def __init__(self, target: Any, draft: Any, first: int, seed: int) -> None:
        self.target, self.draft, self.factor, self.seed = target, draft, 1.0, seed
        self.layers = target.model.layers[first:]
        drawn = torch.randint(1, target.config.vocab_size, OWN_PROMPTS, generator=torch.Generator().manual_seed(seed))
        self.prompts = drawn.to(target.device)

    @torch.no_grad()
    def set(self, factor: float) -> None:
        for layer in self.layers:
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                linear.weight.mul_(factor / self.factor)
        self.factor = factor

    @torch.inference_mode()
    def own_texts(self) -> torch.Tensor:
        """What the target writes behind a few random prompts: it agrees with the draft more often on its own text."""
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            return self.target.generate(
                self.prompts,
                attention_mask=torch.ones_like(self.prompts),
                do_sample=True,
                temperature=TEMPERATURE,
                top_k=0,
                top_p=1.0,
                max_new_tokens=OWN_TOKENS,
            )

    def to_agree(self, wanted: float) -> float:
        """Bisects the factor until the overlap is `wanted` on the target's own texts; the overlap found.

        The texts change with the factor, so it is looked for again on new ones, a few times.
        """
        found = 0.0
        for _ in range(TEXTS):
            texts = self.own_texts()
            found = agreement(self.target, self.draft, texts, OWN_PROMPTS[1])
            if abs(found - wanted) < 2 * CLOSE:
                break
            self._bisect(wanted, texts)
        return found

    def _bisect(self, wanted: float, texts: torch.Tensor) -> None:
        low, high = FACTORS
        for _ in range(STEPS):
            self.set(math.sqrt(low * high))
            found = agreement(self.target, self.draft, texts, OWN_PROMPTS[1])
            if abs(found - wanted) < CLOSE:
                break
            low, high = (self.factor, high) if found > wanted else (low, self.factor)


def random_pair(kind: str, options: argparse.Namespace) -> Iterator[Contest]:
    """A contest for each agreement asked for. The weights are made once, unless an engine would change them."""
    size, dtype = SIZES[kind] if options.scale == "full" else SMALL, DTYPES[options.dtype or "bfloat16"]
    target = random_llama(size, size.layers, dtype, options.device, options.seed)
    draft = first_layers(target, size, dtype, options.device)
    damping = Damping(target, draft, size.draft_layers, options.seed)
    for i, wanted in enumerate(options.agreement):
        found = damping.to_agree(wanted)
        pair = (target, draft)
        if packs_in_place(options):
            pair = (copy.deepcopy(target), copy.deepcopy(draft))
        notes = {
            "target": size.target,
            "draft_size": size.draft,
            "agreement": wanted,
            "overlap": found,
            "damping": damping.factor,
        }
        told = f"{kind}: overlap {found:.3f} (wanted {wanted:g}) at a damping of {damping.factor:.4g}"
        print(told, file=sys.stderr, flush=True)
        yield made(f"{kind}@{wanted:g}", *pair, options, prompt_tokens=64, kind=kind, calls=i == 0, notes=notes)


BUILDERS: dict[str, Callable[[argparse.Namespace], Iterator[Contest]]] = {
    "smollm2": smollm2,
    "stretched": stretched_smollm2,
    "tiny": tiny,
    "1b": lambda options: random_pair("1b", options),
    "8b": lambda options: random_pair("8b", options),
}
