"""tensor_parallel: slices a model over the ranks of a mesh, by torch's parallel styles, for `shard`
to shard over the others.

Plans of transformers' models name a style for each module, most of them torch's own under other
names, and for parameters that are in no module of their own (the weights of all experts of a
layer). What torch's styles do not take has a class here: experts (`_with_local_params`), and the
fused projections of GPT-2, which are in Conv1D, and in no plan (`_sliced`).

Nothing of PEFT is imported: its layers are known by their attributes.
"""

import fnmatch
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardcore.engine.slices import divided
from shardcore.optim.dtensor import is_dtensor, local_part
from shardcore.optim.interface import engine_of
from shardcore.torch_private import split_factor_of, strided_shard

Model = TypeVar("Model", bound=nn.Module)

# A style that is no ParallelStyle of torch's: changes the module in place.
Change = Callable[[nn.Module, DeviceMesh], None]


def tensor_parallel(model: Model, mesh: DeviceMesh, plan: Mapping[str, Any] | None = None) -> Model:
    """Slice a model's weights over the ranks of a mesh, in place. Returns the model, to be sharded
    over the other ranks. Collective.

    Args:
        model: A model with the same weights on every rank of the mesh, or on the meta device, to be
            filled by `shard`. Tied weights stay tied. DTensors replace the Parameters that are
            sliced, so create the optimizer afterwards. A PeftModel is sliced with its LoRA
            adapters; `shard` slices adapters added later, and replaces them in its optimizer.
        mesh: A mesh of one dimension, such as `mesh["tp"]`.
        plan: A dict of styles by module name (`*` for numbers) or parameter name. For modules: a
            style of torch.distributed.tensor.parallel, or one of transformers' names: "colwise",
            "rowwise", "colwise_gather_output", "rowwise_split_input", "embedding_rowwise",
            "replicated_with_grad_allreduce", "mla_kv_a_proj", "moe_tp_experts", "local_params",
            "replicate". For parameters: "colwise", "rowwise" or "packed_colwise". None: the model's
            own plan (`tp_plan` of transformers' models: Llama, Qwen3, Mixtral, DeepSeek, ...), or
            shardcore's for GPT-2. For a PeftModel, use the names of the model inside
            (`get_base_model()`).

    Raises:
        ValueError: For a mesh of several dimensions, a number of attention heads not divisible by
            the number of ranks, a model without a plan for its layers, and a name in a given plan
            that is not a module or parameter of the model.
        NotImplementedError: For an unsupported style of transformers, and for plans that slice only
            some parameters of experts, or cut gates from their inputs. Also for activations on
            whole features (Gemma 3n), for tied weights with different slices, and for PEFT adapters
            other than plain LoRA beside slices.
    """
    op = "tensor_parallel"
    if engine_of(model) is not None:
        raise ValueError(f"{op}: the model is already sharded. Slice it before shard()")
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise ValueError(
            f"{op}: mesh is {mesh!r}; expected a DeviceMesh of 1 dimension, such as mesh['tp']"
        )
    wrapped_model: Any = model
    if hasattr(wrapped_model, "get_base_model"):  # PEFT's
        model = wrapped_model.get_base_model()
    modules, params = dict(model.named_modules()), dict(model.named_parameters())
    # a plan is one for all models of a class: some have no module of a name in it
    is_own_plan = plan is None
    if plan is None:
        plan = _gpt2_plan(modules) or _own_plan(model, modules)
    if not plan:
        raise ValueError(
            f"{op}: {type(model).__name__} defines no plan for its layers. Pass plan={{module "
            "name: style}"
        )
    _check_heads(op, model, mesh.size(), plan if is_own_plan else None)
    changes: dict[str, Any] = {}
    # of parameters: the dimension, and how many blocks of it are cut each by itself
    cuts: dict[str, tuple[int, int]] = {}
    for pattern, style in plan.items():
        matched = fnmatch.filter(modules, pattern)
        fused = [] if matched else fnmatch.filter(params, pattern)
        if not matched and not fused and not is_own_plan:
            raise ValueError(
                f"{op}: plan names {pattern!r}, which is not a module or parameter of the model. "
                "Use their names"
            )
        if fused and style not in _PARAM_STYLES:
            raise NotImplementedError(
                f"{op}: {pattern} is a parameter with the style {style!r}; expected "
                f"{[*_PARAM_STYLES]}"
            )
        cuts |= dict.fromkeys(fused, _PARAM_STYLES.get(style, (0, 0)))
        if style == "mla_kv_a_proj":
            changes |= {name: _sum_rope_gradients(op, name, model) for name in matched}
        elif matched:
            changes |= dict.fromkeys(matched, _style(op, pattern, style))
    tied: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        tied.setdefault(param, []).append(name)
    for name, (dim, blocks) in cuts.items():
        owner, _, attribute = name.rpartition(".")
        dim = dim if params[name].dim() > 1 else -1
        setattr(modules[owner], attribute, _slice(params[name], mesh, dim, blocks))
    for name, style in changes.items():
        if style is None:
            continue
        for module in _inside(modules[name]):
            _change(module, mesh, style)
    slice_adapters(model, op)
    for names in tied.values():
        _tie_again(op, model, names)
    # torch replicates the buffers of what it slices: shard takes ordinary ones
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = local_part(buffer)
    return wrapped_model  # type: ignore[no-any-return]


_PARAM_STYLES = {"colwise": (-2, 1), "rowwise": (-1, 1), "packed_colwise": (-2, 2)}


def _own_plan(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return a model's plan, completed, if it slices layers: some have one for the embedding alone.

    Norms of queries and keys, and activations, that have parameters see what this rank has where
    what comes before them is cut; not every plan names them.
    """
    plan = dict(getattr(model, "_tp_plan", None) or {})
    if not any("*" in pattern and fnmatch.filter(modules, pattern) for pattern in plan):
        return {}
    projection_before = {
        "q_norm": "q_proj",
        "q_layernorm": "q_proj",
        "k_norm": "k_proj",
        "k_layernorm": "k_proj",
        "act_fn": "up_proj",
    }
    for pattern, style in [*plan.items()]:
        if style != "colwise":
            continue
        owner, _, projected = pattern.rpartition(".")
        for name, projection in projection_before.items():
            if projection == projected and f"{owner}.{name}" not in plan:
                plan[f"{owner}.{name}"] = "replicated_with_grad_allreduce"
    return plan


def _check_heads(op: str, model: nn.Module, ranks: int, own_plan: Mapping[str, Any] | None) -> None:
    """Refuse sparse activations, and heads that ranks cannot share equally, unless the model's
    own plan cuts no attention.
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if any(getattr(config, "activation_sparsity_pattern", None) or ()):
        raise NotImplementedError(
            f"{op}: activation_sparsity_pattern is set and needs whole features. Use a model "
            "without it"
        )
    of_attention = [style for pattern, style in (own_plan or {}).items() if "attn" in pattern]
    if own_plan is not None and not any(
        style == "colwise" or callable(style) for style in of_attention
    ):
        return
    for layer in getattr(config, "per_layer_config", None) or [config]:
        for name in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(layer, name, None)
            if heads is not None and heads % ranks:
                raise ValueError(
                    f"{op}: {name} is {heads} on {ranks} ranks; expected a multiple of the number "
                    "of ranks"
                )


def _tie_again(op: str, model: nn.Module, names: list[str]) -> None:
    """Let the parameters of these names be the first one, as they were one before."""
    first, *rest = (model.get_parameter(name) for name in names)
    for name, other in zip(names[1:], rest, strict=True):
        if getattr(other, "placements", None) != getattr(first, "placements", None):
            raise NotImplementedError(
                f"{op}: {names[0]} and {name} are one weight, but the plan slices them "
                'differently. Slice both alike ("embedding_rowwise" for an embedding beside '
                '"colwise_gather_output" for the head), or untie them'
            )
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, first)


def _change(module: nn.Module, mesh: DeviceMesh, style: Any) -> None:
    """Slice a module by a style of torch's, or a Change."""
    if callable(style):
        style(module, mesh)
        return
    parallel = _torch(".parallel")
    parallel.parallelize_module(module, mesh, style)
    # PEFT's LoRA adds lora_B(lora_A(x)) to the output of a layer. Beside sliced outputs lora_A
    # stays whole, and lora_B is sliced as they are; beside sliced inputs the other way round.
    if isinstance(style, parallel.ColwiseParallel):
        _note_for_adapters(module, mesh, style, "lora_B")
    elif isinstance(style, parallel.RowwiseParallel):
        _note_for_adapters(module, mesh, style, "lora_A")


# --- adapters of PEFT's ---------------------------------------------------------------------------


def _inside(module: Any) -> list[nn.Module]:
    """Return a module, or what PEFT has wrapped: the base of an adapter, or the copies of a
    module that trains whole.
    """
    if hasattr(module, "modules_to_save"):
        return [module.original_module, *module.modules_to_save.values()]
    inner = getattr(module, "base_layer", None)
    while isinstance(inner, nn.Module):
        module, inner = inner, getattr(inner, "base_layer", None)
    return [module]


def _note_for_adapters(module: Any, mesh: DeviceMesh, style: Any, *halves: str) -> None:
    """Note what to do with these halves of the adapters of a layer that was changed: those that
    are there already, and those that PEFT adds before `shard`.
    """
    module._of_adapters = dict.fromkeys(halves, (style, mesh))


def slice_adapters(model: nn.Module, op: str = "shard") -> dict[nn.Parameter, nn.Parameter]:
    """Slice the adapters of layers that `tensor_parallel` has sliced, once. Collective.

    Returns the new Parameters by those that they replace. Raises NotImplementedError for adapters
    beside slices that are not plain LoRA.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for name, layer in model.named_modules():
        base: Any = getattr(layer, "base_layer", None)
        if not isinstance(base, nn.Module):
            continue
        adapters = {
            key: param
            for key, param in layer.named_parameters()
            if not key.startswith("base_layer.")
        }
        halves = getattr(base, "_of_adapters", {})
        base_is_sliced = any(map(is_dtensor, base.parameters()))
        adapters_are_sliced = any(map(is_dtensor, adapters.values()))
        by_others = base_is_sliced and not adapters_are_sliced
        if not adapters or not (halves or by_others):
            continue
        is_lora = all(key.startswith(("lora_A.", "lora_B.")) for key in adapters)
        if not halves or not is_lora or getattr(layer, "lora_variant", None):
            raise NotImplementedError(
                f"{op}: {name} uses the adapter {next(iter(adapters))} beside a slice of its "
                "layer; expected plain LoRA (no DoRA, no embeddings, no parameters of experts) on "
                "layers sliced by shardcore.tensor_parallel"
            )
        for half, (style, mesh) in halves.items():
            for linear in getattr(layer, half).values():
                if hasattr(linear, "_of_adapters"):
                    continue
                before = dict(linear.named_parameters())
                _slice_half(linear, base, mesh, style, half)
                for key, param in linear.named_parameters():
                    if param is not before[key]:
                        replaced[before[key]] = param
    return replaced


def _slice_half(linear: nn.Module, base: Any, mesh: DeviceMesh, style: Any, half: str) -> None:
    """Change one Linear of an adapter. PEFT makes it for the base's whole size, or for this
    rank's part.
    """
    dim = ("lora_B", "lora_A").index(half)
    whole = base.weight.shape[base.weight.placements[0].dim] if is_dtensor(base.weight) else None
    for key, param in linear.named_parameters():
        if whole is not None and param.shape[dim] != whole:
            shape = torch.Size(whole if at == dim else size for at, size in enumerate(param.shape))
            stride = torch.empty(shape, device="meta").stride()
            placed, tensor = [_torch().Shard(dim)], _torch().DTensor
            part = tensor.from_local(
                param.detach(), mesh, placed, run_check=False, shape=shape, stride=stride
            )
            linear._parameters[key] = nn.Parameter(part, requires_grad=param.requires_grad)
    _change(linear, mesh, style)
    _note_for_adapters(linear, mesh, style)


def _torch(part: str = "") -> Any:
    """Return torch.distributed.tensor, or a part of it: its import takes most of a second."""
    return import_module(f"torch.distributed.tensor{part}")


def _style(op: str, name: str, style: Any) -> Any:
    """Return a style of torch's, a Change, or None for what stays as it is."""
    if not isinstance(style, str):
        return style
    whole = _torch().Replicate()
    column = _torch(".parallel").ColwiseParallel
    row = _torch(".parallel").RowwiseParallel
    known: dict[str, Any] = {
        "colwise": column(),
        "rowwise": row(),
        "colwise_gather_output": column(output_layouts=whole),
        "rowwise_split_input": row(input_layouts=whole),
        "embedding_rowwise": row(input_layouts=whole),
        "replicated_with_grad_allreduce": _sum_gradients,
        "moe_tp_experts": _experts,
        "local_params": _take_local_params,
        "replicate": None,
    }
    known["colwise_rep"] = known["colwise_gather_output"]
    known["rowwise_rep"] = known["rowwise_split_input"]
    if style not in known:
        raise NotImplementedError(
            f"{op}: {name} uses the unsupported style {style!r}; expected one of {[*known]}"
        )
    return known[style]


def _copied(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return a value that every rank has, for what each does with its slices: gradients are
    added over the ranks.
    """
    tensor = _torch()
    whole = tensor.DTensor.from_local(x, mesh, [tensor.Replicate()], run_check=False)
    return whole.to_local(grad_placements=[tensor.Partial()])  # type: ignore[no-any-return]


def _summed(part: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the sum of what the ranks have, on each of them."""
    tensor = _torch()
    added = tensor.DTensor.from_local(part, mesh, [tensor.Partial()], run_check=False)
    return added.redistribute(placements=[tensor.Replicate()]).to_local()  # type: ignore[no-any-return]


def _sum_rope_gradients(op: str, name: str, model: nn.Module) -> Change:
    """Return what adds the gradients of the last features, which DeepSeek's attention rotates
    and gives each head whole.
    """
    attention = model.get_submodule(name.rpartition(".")[0])
    rotated: Any = getattr(attention, "qk_rope_head_dim", None)
    if rotated is None:
        rotated = getattr(getattr(model, "config", None), "qk_rope_head_dim", None)
    if rotated is None:
        raise NotImplementedError(
            f"{op}: {name} uses the style 'mla_kv_a_proj'; expected attention with qk_rope_head_dim"
        )

    def change(module: nn.Module, mesh: DeviceMesh) -> None:
        def split(_: nn.Module, __: Any, out: torch.Tensor) -> torch.Tensor:
            latent = out.size(-1) - rotated
            return torch.cat([out[..., :latent], _copied(out[..., latent:], mesh)], dim=-1)

        module.register_forward_hook(split)
        _note_for_adapters(module, mesh, change, "lora_B")

    return change


# --- modules that compute with slices of their own parameters: experts of a layer, sinks of attenti


@cache
def _with_local_params(kind: Any) -> type[nn.Module]:
    """Return a subclass whose forward finds this rank's slices where a module of class `kind` has
    parameters.

    Of parameters that are whole every rank uses a copy, for its own heads: their gradients are
    added.
    """

    class LocalParams(kind):  # type: ignore[misc]
        """Computes with slices."""

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            params = {name: param for name, param in self._parameters.items() if param is not None}
            # Attributes are looked up here before they are in the parameters.
            self.__dict__.update(
                {
                    name: p.to_local() if is_dtensor(p) else _copied(p, self._sliced_over)
                    for name, p in params.items()
                }
            )
            try:
                return super().forward(*args, **kwargs)
            finally:
                for name in params:
                    del self.__dict__[name]

    return LocalParams


def _take_local_params(module: Any, mesh: DeviceMesh) -> None:
    module._sliced_over = mesh
    module.__class__ = _with_local_params(module.__class__)


def _sum_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Add the gradients of parameters that every rank has over the ranks: each has seen only its
    own heads.
    """
    for part in module.modules():
        if part._parameters:
            _take_local_params(part, mesh)
            _note_for_adapters(part, mesh, _sum_gradients, "lora_A", "lora_B")


def _experts(module: Any, mesh: DeviceMesh) -> None:
    """Let each rank compute its slice of every expert, and add up what they give."""
    kind = type(module).__name__
    whole = [name for name, param in module.named_parameters() if not is_dtensor(param)]
    if whole:
        raise NotImplementedError(
            f"tensor_parallel: the plan does not slice {whole[0]} of {kind}. Slice all parameters "
            "of it"
        )
    fused = module._parameters.get("gate_up_proj")
    in_halves = getattr(module, "is_concatenated", None)
    blocks = fused is not None and split_factor_of(fused.placements[0]) > 1
    if fused is not None and getattr(module, "has_gate", False) and in_halves not in (None, blocks):
        expected = '"packed_colwise"' if in_halves else '"colwise"'
        raise NotImplementedError(
            f"tensor_parallel: {kind}.gate_up_proj is cut across gates and inputs; expected "
            f"{expected}"
        )

    def copied(value: Any) -> Any:
        is_floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return _copied(value, mesh) if is_floating else value

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(map(copied, args)), {name: copied(value) for name, value in kwargs.items()}

    _take_local_params(module, mesh)
    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(lambda _, __, out: _summed(out, mesh))


# --- GPT-2 ----------------------------------------------------------------------------------------


def _gpt2_plan(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return the plan of transformers' GPT-2, with or without a head, nothing for other models."""
    plan: dict[str, Any] = {}
    for name, module in modules.items():
        kind = type(module).__name__
        if kind == "GPT2Attention":
            if getattr(module, "is_cross_attention", False):
                raise NotImplementedError(
                    f"tensor_parallel: {name} is cross attention, which is not supported in GPT-2"
                )
            plan |= {name: _split_heads, f"{name}.c_attn": _columns(3), f"{name}.c_proj": _rows}
        elif kind == "GPT2MLP":
            plan |= {f"{name}.c_fc": _columns(1), f"{name}.c_proj": _rows}
        elif kind == "GPT2Model":
            plan[f"{name}.wte".lstrip(".")] = "embedding_rowwise"
        elif kind == "GPT2LMHeadModel":
            plan["lm_head"] = "colwise_gather_output"
    return plan


def _split_heads(attention: Any, mesh: DeviceMesh) -> None:
    attention.split_size //= mesh.size()


@cache
def _sliced(conv1d: Any) -> tuple[type[nn.Module], type[nn.Module]]:
    """Return transformers' Conv1D, or the Linear of its adapters, with sliced outputs, and with
    sliced inputs.

    The weight of a Conv1D is (inputs, outputs).
    """
    is_linear = issubclass(conv1d, nn.Linear)

    class ColumnConv1D(conv1d):  # type: ignore[misc]
        """Takes whole inputs; returns this rank's outputs."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, weight = _copied(x, self.weight.device_mesh), self.weight.to_local()
            if is_linear:
                return F.linear(x, weight, None if self.bias is None else self.bias.to_local())
            flat = torch.addmm(self.bias.to_local(), x.reshape(-1, x.size(-1)), weight)
            out: torch.Tensor = flat.view(*x.shape[:-1], -1)
            return out

    class RowConv1D(conv1d):  # type: ignore[misc]
        """Takes this rank's inputs; returns whole outputs."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.weight.to_local().t() if is_linear else self.weight.to_local()
            whole = _summed(x @ weight, self.weight.device_mesh)
            return whole if self.bias is None else whole + self.bias

    return ColumnConv1D, RowConv1D


def _columns(blocks: int) -> Change:
    """Return what slices the outputs of a Conv1D, each of so many blocks of them (queries, keys,
    values) by itself.
    """

    def change(module: Any, mesh: DeviceMesh) -> None:
        module.weight = _slice(
            module.weight, mesh, 0 if isinstance(module, nn.Linear) else -1, blocks
        )
        module.bias = None if module.bias is None else _slice(module.bias, mesh, -1, blocks)
        module.__class__ = _sliced(module.__class__)[0]
        _note_for_adapters(module, mesh, change, "lora_B")

    return change


def _rows(module: Any, mesh: DeviceMesh) -> None:
    module.weight = _slice(module.weight, mesh, 1 if isinstance(module, nn.Linear) else 0, 1)
    module.__class__ = _sliced(module.__class__)[1]
    _note_for_adapters(module, mesh, _rows, "lora_A")


def _slice(param: nn.Parameter, mesh: DeviceMesh, dim: int, blocks: int) -> nn.Parameter:
    """Return a parameter of rank 0's values, of which this rank has a slice of each block along
    `dim`.
    """
    dim %= param.dim()
    if param.shape[dim] % (blocks * mesh.size()):
        raise ValueError(
            f"tensor_parallel: a weight has shape {tuple(param.shape)}; expected {blocks} x "
            f"{mesh.size()} equal parts of dimension {dim}"
        )
    values = param.detach().contiguous()
    if not values.is_meta:
        # NCCL takes nothing else; torch's own styles move weights there, too
        values = values.to(mesh.device_type)
        dist.broadcast(values, dist.get_global_rank(mesh.get_group(), 0), group=mesh.get_group())
    mine = (
        divided(values, dim, blocks, mesh.size(), -1)
        .select(dim + 1, mesh.get_local_rank())
        .flatten(dim, dim + 1)
    )
    placement = _torch().Shard(dim) if blocks == 1 else strided_shard(dim, blocks)
    # of memory of its own: the whole weight's is freed
    mine = mine.clone(memory_format=torch.contiguous_format)
    sliced = _torch().DTensor.from_local(
        mine, mesh, [placement], run_check=False, shape=param.shape, stride=values.stride()
    )
    return nn.Parameter(sliced, requires_grad=param.requires_grad)
