"""One thread: tiny tensors gain nothing from more, and a busy machine loses a lot."""

import torch

torch.set_num_threads(1)
