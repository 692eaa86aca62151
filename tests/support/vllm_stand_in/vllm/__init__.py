"""What TRL uses of vLLM, for tests without GPUs: a plain model behind the same calls.

It checks what vLLM needs: weights by names that the model has, all of them before it generates, and
none into memory that sleep has released.
"""

from types import SimpleNamespace
from typing import Any

from vllm.model import Model
from vllm.sampling_params import SamplingParams

__version__ = "0.24.0"  # TRL reads it where there is no metadata
RequestOutput = SimpleNamespace


class LLM:
    """An engine in the trainer's process."""

    def __init__(self, model: str, enable_sleep_mode: bool = False, **unused: Any) -> None:
        self.model = Model(model)
        self._sleeps = enable_sleep_mode
        runner = SimpleNamespace(model_runner=SimpleNamespace(model=self.model))
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=runner),
            model_config=SimpleNamespace(max_model_len=32),
        )

    def sleep(self, level: int) -> None:
        """Release memory."""
        assert self._sleeps
        self.model.sleep(level)

    def wake_up(self, tags: list[str]) -> None:
        """Allocate memory again; weights have no values."""
        self.model.awake.update(tags)

    def reset_prefix_cache(self) -> None:
        """Nothing is cached."""

    def generate(
        self, prompts: list[Any], sampling_params: SamplingParams, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Complete each prompt n times."""
        results = []
        for prompt in prompts:
            given = prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt
            outputs = []
            for _ in range(sampling_params.n):
                asked, tokens, values = self.model.complete(given, sampling_params.max_tokens)
                logprobs = [
                    {token: SimpleNamespace(logprob=value, rank=1)}
                    for token, value in zip(tokens, values, strict=True)
                ]
                outputs.append(SimpleNamespace(token_ids=tokens, logprobs=logprobs))
            results.append(RequestOutput(prompt_token_ids=asked, outputs=outputs))
        return results
