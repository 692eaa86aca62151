"""A plain model of transformers on the CPU, which has no weights until they are loaded."""

from collections.abc import Iterable
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoTokenizer


class Model:
    """received: the tensors of the last update, by the names that came with them; a test empties it."""

    def __init__(self, folder: str) -> None:
        config = AutoConfig.from_pretrained(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
        self.received: dict[str, torch.Tensor] = {}
        self.loaded: set[str] = set()
        self.awake = {"weights", "kv_cache"}
        self.generator = torch.Generator().manual_seed(0)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy weights into the parameters of these names."""
        assert "weights" in self.awake, "weights are loaded into memory that is released"
        for name, value in weights:
            param = self.model.get_parameter(name)
            assert param.shape == value.shape, name
            assert name not in self.received, f"{name} came twice"
            param.data.copy_(value)
            self.received[name] = value.clone()
            self.loaded.add(name)

    def sleep(self, level: int) -> None:
        """Lose the weights."""
        assert level == 2
        self.awake.clear()
        self.loaded.clear()

    def complete(
        self, prompt: str | list[int], max_tokens: int
    ) -> tuple[list[int], list[int], list[float]]:
        """Return the prompt's tokens, sampled tokens, and their log probabilities."""
        assert self.awake == {"weights", "kv_cache"}
        for name, _ in self.model.named_parameters():
            assert name in self.loaded, f"generates without {name}"
        asked = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else [*prompt]
        tokens: list[int] = []
        logprobs: list[float] = []
        while len(tokens) < max_tokens and self.tokenizer.eos_token_id not in tokens:
            with torch.no_grad():
                logits = self.model(torch.tensor([asked + tokens])).logits[0, -1]
            chosen: Any = torch.multinomial(logits.softmax(-1), 1, generator=self.generator)
            tokens.append(chosen.item())
            logprobs.append(logits.log_softmax(-1)[tokens[-1]].item())
        return asked, tokens, logprobs
