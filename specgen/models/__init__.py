"""A causal language model with its cache, and how its calls are executed."""
