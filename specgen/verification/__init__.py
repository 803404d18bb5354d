"""The rules, the law, the overlap, the one judge: tensors in, tensors out, no model."""
