"""A feed-forward network made of experts, a few of which compute each token. Source: Shazeer et al. 2017 (arXiv:1701.06538)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from llm_engine.attention import ROW_MULTIPLE
from llm_engine.feed_forward import FeedForward
from llm_engine.linear import Projection


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MixtureOfExperts:
    """See ``ExpertsConfig``.

    A token's result does not depend on the others: each expert's rows are padded to a multiple of ``ROW_MULTIPLE``, and what
    a token's experts yield is added in the experts' order.
    """

    router: Projection  # [num_experts, hidden_size]
    experts: tuple[FeedForward, ...]
    num_chosen: int
    is_normalized: bool

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, hidden_size] → the same shape."""
        shares, chosen = self.router(x).float().softmax(-1).topk(self.num_chosen)  # both [num_tokens, num_chosen]
        if self.is_normalized:
            shares = shares / shares.sum(-1, keepdim=True)
        shares = shares.to(x.dtype)
        output = torch.zeros_like(x)
        for index in sorted(set(chosen.flatten().tolist())):
            tokens, places = (chosen == index).nonzero(as_tuple=True)
            rows = functional.pad(x[tokens], (0, 0, 0, -len(tokens) % ROW_MULTIPLE))
            yielded = self.experts[index](rows)[: len(tokens)]
            output.index_add_(0, tokens, yielded * shares[tokens, places].unsqueeze(1))
        return output
