"""A server in the process of its client, which calls it in place of HTTP."""

from collections.abc import Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch

from vllm.model import Model


class Server:
    """Answers the requests of TRL's VLLMClient; also its session, and its communicator."""

    def __init__(self, folder: str) -> None:
        self.model = Model(folder)
        self._announced: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._updating = False

    def get(self, url: str, **unused: Any) -> SimpleNamespace:
        """Say how it was started."""
        assert url.endswith("/server_info")
        config = {"model_config": {"logprobs_mode": "processed_logprobs"}}
        return _response({"vllm_config": config})

    def post(self, url: str, json: Any = None) -> SimpleNamespace:
        """Do what a request says."""
        return _response(getattr(self, f"_{url.rpartition('/')[2]}")(json))

    def receive(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load what was announced."""
        info = self._announced.get(timeout=60)
        fields = zip(info["names"], info["dtype_names"], info["shapes"], strict=True)
        for (name, value), announced in zip(weights, fields, strict=True):
            assert (name, str(value.dtype), [*value.shape]) == (
                announced[0],
                f"torch.{announced[1]}",
                announced[2],
            )
            self.model.load_weights([(name, value)])

    def _start_weight_update(self, _: Any) -> None:
        assert not self._updating
        self._updating = True

    def _update_weights(self, request: dict[str, Any]) -> None:
        assert self._updating
        self._announced.put(request["update_info"])

    def _finish_weight_update(self, _: Any) -> None:
        self._updating = False

    def _reset_prefix_cache(self, _: Any) -> None:
        assert not self._updating

    def _completions(self, request: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for prompt in request["prompt"]:
            for _ in range(request["n"]):
                asked, tokens, values = self.model.complete(prompt, request["max_tokens"])
                logprobs = {
                    "tokens": [f"token_id:{token}" for token in tokens],
                    "token_logprobs": values,
                    "top_logprobs": [{}] * len(tokens),
                }
                ids = {"prompt_token_ids": asked, "token_ids": tokens}
                choices.append({**ids, "logprobs": logprobs})
        return {"choices": choices}


def _response(answer: Any) -> SimpleNamespace:
    return SimpleNamespace(status_code=200, json=lambda: answer)
