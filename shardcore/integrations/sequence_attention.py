"""Sequence parallel attention in the models of transformers, through its registers of attention
functions and of masks.

A model's configuration gets the name of an attention function of its own, so no other model is
changed. Its mask is made for whole sequences, once a forward; attention itself is then the one that
the model had, over all tokens and some of the heads.
"""

import copy
import sys
import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from shardcore.parallel.sequence import gather_sequence, group_of_sequence, ulysses_attention

_numbers = count()
_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
# transformers' names of losses over next tokens; None: no head
_LOSSES = (None, "ForCausalLM", "ForConditionalGeneration")


def enable_sequence_parallel(
    model: nn.Module, group: dist.ProcessGroup | DeviceMesh, *, in_eval: bool = True
) -> None:
    """Run the attention of a transformers decoder over sequences that are split over the ranks of a
    group.

    Call it before or after `shard`. The ranks of `shard` are the ranks of all sequences, and
    gradients are averaged over them. Afterwards every rank passes the result of
    `shardcore.split_sequences`: its parts of `input_ids`, of `attention_mask` (batch, tokens) if
    there is one, and of `position_ids`. Positions may restart within a sequence (packed documents).

    Any registered attention of the model keeps working inside ("sdpa", "eager", flash and custom
    functions; flash attention has not been run). Each rank draws its own dropout.
    `config.use_cache` becomes False. The model's forward and backward become collective.

    Args:
        model: a decoder, such as LlamaForCausalLM, or a PeftModel with a decoder inside. It is
            changed in place.
        group: the ranks of a sequence, or a mesh of one dimension such as mesh["sp"]. Its size must
            divide the attention heads.
        in_eval: False: in evaluation mode (`model.eval()`) each rank passes whole sequences, and
            the model behaves as before.

    Raises TypeError for a model of another library. Raises ValueError for:

    - encoder-decoders, and layers with states along a sequence;
    - a head with labels other than the next tokens (...ForSequenceClassification);
    - trainable prompts of PEFT;
    - attention heads that do not fit.

    Forward raises ValueError without position_ids, with a filled cache (generate with another
    model), and for masks of its own over positions.

    Source: https://huggingface.co/docs/transformers/attention_interface.
    """
    wrapped_model: Any = model
    if hasattr(wrapped_model, "get_base_model"):  # PEFT's, which calls the model inside
        model = wrapped_model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"enable_sequence_parallel: model is a {type(model).__name__}; expected a model of "
            f"transformers"
        )
    if wrapped_model is not model and wrapped_model.active_peft_config.is_prompt_learning:
        raise ValueError(
            f"enable_sequence_parallel: the {type(wrapped_model).__name__} trains a prompt, and "
            "every rank would put it before its part of a sequence; expected adapters of layers, "
            "such as LoRA"
        )
    if model.loss_type not in _LOSSES:
        raise ValueError(
            f"enable_sequence_parallel: the labels of the {type(model).__name__}'s head are not "
            "the next tokens; expected a ...ForCausalLM model, or a model without a head, such as "
            "model.base_model, with your loss over a rank's tokens"
        )
    config = model.config.get_text_config()
    other_layers = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    described = ""
    if config.is_encoder_decoder:
        described = "an encoder-decoder"
    elif other_layers:
        described = f"layers {sorted(other_layers)}"
    elif not model._supports_attention_backend:
        described = "its own attention"
    if described:
        raise ValueError(
            f"enable_sequence_parallel: the {type(model).__name__} has {described}; expected a "
            f"decoder whose layers are all attention of transformers' interface, since other "
            f"layers would see a part of each sequence"
        )
    group = group_of_sequence(group)
    if config.num_attention_heads % group.size():
        raise ValueError(
            f"enable_sequence_parallel: the model has {config.num_attention_heads} attention "
            f"heads; expected a multiple of the group's {group.size()} ranks"
        )
    attention = _Attention(config._attn_implementation or "eager", group, in_eval)
    # with "flash" in it where models look for that
    name = f"{attention.base}_sequence_parallel_{next(_numbers)}"
    AttentionInterface.register(name, attention.attend)
    if attention.base in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(name, attention.mask)
    config._attn_implementation, config.use_cache = name, False
    model.register_forward_pre_hook(attention.before_forward, with_kwargs=True)


class _Attention:
    """The attention of one model over a group; `base` is the name of the one inside."""

    def __init__(self, base: str, group: dist.ProcessGroup, in_eval: bool) -> None:
        self.base, self.group, self._in_eval = base, group, in_eval
        self._model: Callable[[], nn.Module | None] = lambda: None  # the one that ran last
        # (batch, tokens of whole sequences): positions, and, if several documents are packed, which
        # of them.
        self.positions: torch.Tensor
        self.documents: torch.Tensor | None

    def __deepcopy__(self, memo: Any) -> "_Attention":
        return self  # a process group has no copies

    @property
    def is_off(self) -> bool:
        """Whether each rank has whole sequences. By the model's mode now: a backward computes
        blocks again after others ran.
        """
        model = self._model()
        return not self._in_eval and model is not None and not model.training

    def before_forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Take the positions of whole sequences, before the model makes its mask."""
        self._model = weakref.ref(model)  # transformers' register never lets go of this object
        if self.is_off:
            return args, kwargs
        positions = kwargs.get("position_ids")
        if positions is None:
            raise ValueError(
                f"{type(model).__name__}: position_ids is missing; expected each rank's positions "
                f"in the whole sequence, as shardcore.split_sequences adds them (every rank would "
                f"take its part for the beginning)"
            )
        self.positions = gather_sequence(positions, self.group)
        self.documents = masking_utils.find_packed_sequence_indices(self.positions)
        if self.documents is not None and kwargs.get("attention_mask") is None:
            # Else transformers looks for documents in this rank's positions.
            ones = torch.ones(positions.shape, dtype=torch.bool, device=positions.device)
            kwargs = {**kwargs, "attention_mask": ones}
        return args, kwargs

    def mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int = 0,
        kv_offset: int = 0,
        *,
        mask_function: Callable[..., Any],
        attention_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Return the mask of whole sequences, as the attention inside takes it; see
        transformers.masking_utils.sdpa_mask.
        """
        make = ALL_MASK_ATTENTION_FUNCTIONS[self.base]
        if self.is_off:
            options |= {"mask_function": mask_function, "attention_mask": attention_mask}
            return make(batch_size, q_length, kv_length, q_offset, kv_offset, **options)
        if q_length != kv_length or q_offset != 0 or kv_offset != 0:
            raise ValueError(
                f"sequence parallel attention: {q_length} tokens attend to {kv_length}; expected "
                f"no tokens in a cache, and an attention_mask of this rank's tokens alone"
            )
        skips = [
            options.get(f"allow_is_{kind}_skip", default)
            for kind, default in (("causal", True), ("bidirectional", False))
        ]
        if options.get("use_vmap") or not any(skips):
            raise ValueError(
                "sequence parallel attention: the model passes its own mask over positions in a "
                "sequence; expected causal, sliding, or full attention (a mask of four dimensions "
                "for whole sequences may be passed instead)"
            )
        if attention_mask is not None:
            attention_mask = gather_sequence(attention_mask, self.group)
        if self.documents is not None:
            positions, documents = (
                rows.expand(batch_size, -1) for rows in (self.positions, self.documents)
            )
            mask_function = masking_utils.remap_positions_for_packed_sequence(
                mask_function, positions
            )
            mask_function = masking_utils.and_masks(
                mask_function, masking_utils.packed_sequence_mask_function(documents)
            )
            options = {
                **options,
                "allow_is_causal_skip": False,
                "allow_is_bidirectional_skip": False,
            }
        length = q_length * self.group.size()
        return make(
            batch_size=batch_size,
            q_length=length,
            kv_length=length,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **options,
        )

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return (batch, tokens, heads, features) and no weights; see transformers' attention
        functions.
        """
        if self.is_off:
            seen = _Seen(module, self.base, query.shape[1] // key.shape[1])
            return self._function_of(module)(seen, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
        for name in ("position_bias", "s_aux"):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"sequence parallel attention: the model passes {name}, per head; expected "
                    f"attention without"
                )
        if query.shape[2] != key.shape[2]:
            raise ValueError(
                f"sequence parallel attention: {query.shape[2]} tokens attend to {key.shape[2]}; "
                f"expected no tokens in a cache"
            )
        # which finds documents by them
        if "flash" in self.base and kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = gather_sequence(kwargs["position_ids"], self.group)

        def inside(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            seen = _Seen(module, self.base, query.shape[1] // key.shape[1])
            output: torch.Tensor = self._function_of(module)(
                seen, query, key, value, attention_mask, **kwargs
            )[0]
            return output.transpose(1, 2)

        return ulysses_attention(inside, query, key, value, self.group).transpose(1, 2), None

    def _function_of(self, module: nn.Module) -> Callable[..., Any]:
        if self.base in ALL_ATTENTION_FUNCTIONS:
            return ALL_ATTENTION_FUNCTIONS[self.base]  # type: ignore[no-any-return]
        return sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[no-any-return]


class _Seen:
    """A module as the attention inside sees it: with the name of that attention, and the groups
    of heads on this rank.
    """

    def __init__(self, module: nn.Module, base: str, groups: int) -> None:
        self._module, self._base, self.num_key_value_groups = module, base, groups

    def __getattr__(self, name: str) -> Any:
        if name != "config":
            return getattr(self._module, name)
        config: Any = copy.copy(self._module.config)
        config._attn_implementation = self._base
        return config
