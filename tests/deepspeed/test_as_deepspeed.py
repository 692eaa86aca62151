"""shardcore run --as-deepspeed: scripts of Trainer and TRL that know nothing of shardcore, and
import deepspeed.

Accelerate has DeepSpeed on GPUs only, so on the CPU ranks of these tests PROGRAM starts the
scripts, with gloo.
"""

import importlib.util
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

for needed in ("transformers", "accelerate", "safetensors"):
    pytest.importorskip(needed, reason="tests with Trainer")

from safetensors.torch import load_file  # noqa: E402

from shardcore.deepspeed.as_deepspeed import install_as_deepspeed  # noqa: E402
from tests.support.huggingface import launched, save_tiny_llama, tiny_gpt2  # noqa: E402
from tests.support.models import error_of  # noqa: E402
from tests.support.ranks import run_fresh, run_ranks, start  # noqa: E402
from tests.support.scripts import environment, run_here  # noqa: E402
from tests.support.vllm_trainers import save_tiny_model  # noqa: E402

PROGRAM = """
import importlib.metadata, importlib.util
found = importlib.util.find_spec("deepspeed") and importlib.metadata.version("deepspeed")
import json, os, runpy, sys
import torch
import deepspeed
from deepspeed.ops.adam import FusedAdam

class Data(torch.utils.data.Dataset):
    # From Python 3.14 on a loader's workers start a new interpreter, which imports this file, by default.
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return found, deepspeed.initialize.__module__, FusedAdam.__module__

def check_names():
    import shardcore
    from shardcore.deepspeed.as_deepspeed import install_as_deepspeed
    install_as_deepspeed()                                      # again: does nothing
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    from deepspeed import comm, zero
    assert deepspeed.initialize is shardcore.initialize and deepspeed.zero is zero
    for name in ("deepspeed", "deepspeed.zero", "deepspeed.ops.adam"):
        assert importlib.util.find_spec(name) is sys.modules[name].__spec__ is not None
    assert importlib.metadata.version("deepspeed") == deepspeed.__version__ == "0.19.8" != importlib.metadata.version("torch")
    assert importlib.metadata.packages_distributions()["deepspeed"][0] == "deepspeed"
    from accelerate.utils import is_deepspeed_available
    from accelerate.utils.versions import compare_versions
    assert is_deepspeed_available() and compare_versions("deepspeed", ">=", "0.16.4")
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig
    assert HfTrainerDeepSpeedConfig({"zero_optimization": {"stage": 3}}).is_zero3()
    for text in ("from deepspeed import InferenceEngine", "import deepspeed.inference.engine"):
        try:
            exec(text)
        except ImportError as error:
            print("refused:", error)

if __name__ == "__main__":
    for how in ("fork", "forkserver"):
        print("worker:", *next(iter(torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context=how))))
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import AutoModelForCausalLM, GPT2LMHeadModel, HfArgumentParser, LlamaForCausalLM, Trainer
    if len(sys.argv) > 1:
        import datasets, peft, shardcore
        sys.path.insert(1, os.path.dirname(os.path.dirname(shardcore.__file__)))
        from tests.support.vllm_trainers import use_stand_in
        use_stand_in()
        from trl import DPOTrainer, GRPOTrainer, SFTTrainer
    check_names()
    PartialState._prepare_backend = lambda self, cpu, sagemaker, backend=None: ("gloo", None)
    sys.stdout.flush()
    child = os.fork()                                           # both ranks, of one import of all that
    rank = str(int(child == 0))
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    with open("runs.json") as file:
        runs = json.load(file)
    for sys.argv in runs:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        runpy.run_path(sys.argv[0], run_name="__main__")
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(os.waitpid(child, 0)[1] != 0 if child else 0)
"""
HEAD = """
import json, sys, torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

def tiny():
    torch.manual_seed(0)
    sizes = dict(vocab_size=40, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1)
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))

def rows():
    return list(torch.randint(3, 40, (64, 8), generator=torch.Generator().manual_seed(1)))

def finish(trainer):
    trainer.save_model()
    if trainer.args.process_index == 0:
        log = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        found = {name: [entry[name] for entry in log] for name in ("loss", "grad_norm", "learning_rate")}
        found["eval_loss"] = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        with open(trainer.args.output_dir + "/log.json", "w") as file:
            json.dump(found, file)
"""
TRAINER = """
(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
data = [{"input_ids": ids, "labels": ids} for ids in rows()]
trainer = Trainer(model=tiny(), args=args, train_dataset=data, eval_dataset=data[:8])
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
trainer.evaluate()
if args.deepspeed:
    trainer.deepspeed._zero3_consolidated_16bit_state_dict = None   # at stage 3 save_model streams
finish(trainer)
"""
FROM_PRETRAINED = """
(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
torch.manual_seed(args.process_index)                       # ranks are to agree all the same
model = AutoModelForCausalLM.from_pretrained("saved")
fresh = AutoModelForCausalLM.from_config(model.config)
if args.deepspeed:
    import deepspeed
    params = [*model.parameters(), *fresh.parameters()]
    assert all(param.shape == (0,) and param.ds_tensor.numel() * 2 <= param.ds_numel + 1 for param in params)
    with deepspeed.zero.GatheredParameters(params):
        sums = torch.stack([param.double().sum() for param in params])
    assert sums.count_nonzero() > len(sums) // 2
    others = [torch.empty_like(sums) for _ in range(args.world_size)]
    torch.distributed.all_gather(others, sums.detach())
    assert all(torch.equal(sums, other) for other in others), others
model.resize_token_embeddings(48, mean_resizing=False)
data = [{"input_ids": ids, "labels": ids} for ids in rows()]
trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data[:8])
trainer.train()
finish(trainer)
"""
SFT = """
import datasets, peft
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

(args,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses()
words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(40)}, unk_token="w3"))
trainer = SFTTrainer(
    model=tiny(),
    args=args,
    train_dataset=datasets.Dataset.from_list([{"input_ids": ids.tolist()} for ids in rows()]),
    processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2"),
    peft_config=peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"),
)
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
finish(trainer)
"""
EVALUATION = """
(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
data = [{"input_ids": ids, "labels": ids} for ids in rows()]
trainer = Trainer(model=tiny(), args=args, eval_dataset=data)
trainer.state.log_history = [{"loss": trainer.evaluate()["eval_loss"], "grad_norm": 0.0, "learning_rate": 0.0}]
finish(trainer)
"""
DPO = """
import datasets
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

(args,) = HfArgumentParser(DPOConfig).parse_args_into_dataclasses()
words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(40)}, unk_token="w3"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()

def text(ids):
    return "".join(f" w{index}" for index in ids.tolist())

trainer = DPOTrainer(
    model=tiny(),
    ref_model=tiny(),                                       # goes to initialize without an optimizer
    args=args,
    train_dataset=datasets.Dataset.from_list(
        [{"prompt": text(ids[:4]), "chosen": text(ids[4:6]), "rejected": text(ids[6:])} for ids in rows()]
    ),
    processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2"),
)
trainer.train()
finish(trainer)
"""
GRPO = """
import datasets
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

(args,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses()
words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(40)}, unk_token="w3"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
trainer = GRPOTrainer(
    model="saved",
    args=args,
    reward_funcs=lambda completions, **columns: [float(text.count("7")) for text in completions],
    train_dataset=datasets.Dataset.from_list([{"prompt": "".join(f" w{index}" for index in ids[:4])} for ids in rows()]),
    processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2", padding_side="left"),
)
trainer.train()
finish(trainer)
"""
VLLM = """
import pytest
from trl import GRPOConfig, GRPOTrainer
from tests.support.vllm_trainers import connect, train_with_vllm

(args,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses()
with pytest.MonkeyPatch.context() as patch:
    connect(patch, "saved")
    trainer, compared = train_with_vllm(GRPOTrainer, args, "saved", lora=args.vllm_mode == "colocate")
receives = args.vllm_mode == "colocate" or args.process_index == 0
assert compared == receives * args.max_steps * len([*tiny().parameters()]), compared
finish(trainer)
"""
ULYSSES = """
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from transformers import LlamaConfig, LlamaForCausalLM, default_data_collator

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
if args.deepspeed:
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    args.parallelism_config = ParallelismConfig(sp_backend="deepspeed", sp_size=2, sp_handler=handler)
torch.manual_seed(0)
sizes = dict(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa"))
data = []
for ids in rows():
    labels = ids.clone()
    labels[:3] = -100                                       # so that one rank has fewer of them
    data.append({"input_ids": ids, "labels": labels, "position_ids": torch.arange(8)})
trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data[:4], data_collator=default_data_collator)
trainer.train()
finish(trainer)
"""
ZERO = {
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
}
CONFIG: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
ADAMW = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
WARMUP = {
    name: "auto"
    for name in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
}


def config(stage: int, **more: Any) -> dict[str, Any]:
    zero = {
        "stage": stage,
        "stage3_gather_16bit_weights_on_model_save": True,
        **ZERO,
        **more.pop("zero", {}),
    }
    return {**CONFIG, "zero_optimization": zero, **more}


def words_of(out: str, *words: str) -> list[str]:
    settings = {
        "output_dir": out,
        "max_steps": 4,
        "save_steps": 2,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "report_to": "none",
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.01,
        "max_grad_norm": 0.5,
        "disable_tqdm": 1,
        "logging_nan_inf_filter": 0,
    }
    options = [f"--{name}={value}" for name, value in settings.items() if f"--{name}" not in words]
    return [*options, *words]


def result_of(folder: Path) -> dict[str, Any]:
    """Return the log and the weights that a run has left."""
    result: dict[str, Any] = json.loads((folder / "log.json").read_text())
    for name in ("model", "adapter_model"):
        file = folder / f"{name}.safetensors"
        if file.exists():
            result["weights"] = load_file(file)
    return result


QLORA = """
import peft
from transformers import BitsAndBytesConfig
(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
model = AutoModelForCausalLM.from_pretrained("llama", quantization_config=four_bits, dtype=torch.float32)
stage = args.hf_deepspeed_config.config["zero_optimization"]["stage"]
assert all(hasattr(param, "ds_tensor") == (stage == 3) for param in model.parameters())
model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
torch.manual_seed(0)
lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
data = [{"input_ids": ids, "labels": ids} for ids in rows()]
trainer = Trainer(model=peft.get_peft_model(model, lora), args=args, train_dataset=data)
trainer.train()
finish(trainer)
"""


Run = tuple[str, dict[str, Any], tuple[str, ...]]  # a script, DeepSpeed's configuration, arguments


def run(folder: Path, runs: dict[str, Run], *libraries: str) -> dict[str, Any]:
    """Make trainings by one shardcore run, one after the other; return the log and weights of each
    by its name, and its output.

    Starting a rank and importing what it needs takes ten times as long as a training: so one does,
    and forks the other one.
    """
    lines = []
    for name, (text, ds, words) in runs.items():
        (folder / f"{name}.py").write_text(HEAD + text)
        (folder / f"{name}.json").write_text(json.dumps(ds))
        lines.append([f"{name}.py", "--deepspeed", f"{name}.json", *words_of(name, *words)])
    (folder / "runs.json").write_text(json.dumps(lines))
    (folder / "program.py").write_text(PROGRAM)
    # Without PYTHONPATH: shardcore is found wherever the launcher was.
    own = {
        name: value
        for name, value in environment().items()
        if name != "PYTHONPATH" and not name.startswith("ACCELERATE_")
    }
    command = (
        "run",
        "--num_gpus",
        "1",
        "--no_local_rank",
        "--as-deepspeed",
        "program.py",
        *libraries,
    )
    output = folder / "said"
    process = start(
        run_here, "shardcore", command, own | {"ACCELERATE_TORCH_DEVICE": "cpu"}, folder, output
    )
    process.join(400)
    process.kill()
    assert process.exitcode == 0, (
        output.read_text()[-1000:] + output.with_suffix(".err").read_text()[-4000:]
    )
    return {name: result_of(folder / name) for name in runs} | {
        "folder": folder,
        "said": output.read_text(),
    }


def _run_plain(rank: int, world_size: int, folder: str, words: list[str]) -> None:
    with launched(rank, world_size), pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["train.py", "--use_cpu=1", *words])
        runpy.run_path("train.py", run_name="__main__")


def run_plain(folder: Path, text: str, *words: str, ranks: int = 2) -> dict[str, Any]:
    """Run a script under DDP, on ranks that have imported what it needs; return its log and
    weights.
    """
    (folder / "train.py").write_text(HEAD + text)
    run_ranks(ranks, _run_plain, str(folder), words_of("plain", *words))
    return result_of(folder / "plain")


def same_weights(one: dict[str, Any], other: dict[str, Any]) -> bool:
    a, b = one["weights"], other["weights"]
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def close(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        one[key] == pytest.approx(other[key], rel=1e-5)
        for key in ("loss", "grad_norm", "learning_rate")
    )


def _four_bits(folder: str, reader: bool) -> list[bool]:
    """Return which parameters have pieces. The broken twin has no reader."""
    for name in [
        name
        for name in sys.modules
        if name.partition(".")[0] in ("deepspeed", "accelerate", "transformers")
    ]:
        del sys.modules[name]
    install_as_deepspeed()
    if not reader:
        sys.meta_path.pop(0)
    import transformers
    from transformers.integrations import HfDeepSpeedConfig

    config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=transformers.BitsAndBytesConfig(load_in_4bit=True)
    )
    assert config.is_zero3()
    return [hasattr(param, "ds_tensor") for param in model.parameters()]


def test_a_base_in_4_bits_is_read_into_pieces(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="tests with bitsandbytes")
    save_tiny_llama(tmp_path)
    assert all(run_fresh(_four_bits, str(tmp_path), True))
    assert not any(run_fresh(_four_bits, str(tmp_path), False))


# --- names ----------------------------------------------------------------------------------------


def _too_late() -> list[str]:
    """What it says where a library is imported already: empty modules stand for the real ones."""
    for name in [
        name
        for name in sys.modules
        if name.partition(".")[0] in ("deepspeed", "accelerate", "transformers")
    ]:
        del sys.modules[name]
    messages = []
    for name in ("deepspeed", "accelerate", "transformers"):
        sys.modules[name] = type(sys)(name)
        messages.append(error_of(install_as_deepspeed))
        del sys.modules[name]
    assert not any("shardcore" in str(finder) for finder in sys.meta_path)
    assert not hasattr(torch.nn.Parameter, "ds_status")
    return messages


def test_it_is_refused_where_it_comes_too_late() -> None:
    messages = run_fresh(_too_late)
    for line, name in zip(messages, ("deepspeed", "accelerate", "transformers"), strict=True):
        assert line.startswith(f"RuntimeError: install_as_deepspeed: {name} is imported already")
    assert "the real DeepSpeed would be in use beside shardcore" in messages[0]


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
FP16 = {"enabled": True, "initial_scale_power": 40, "hysteresis": 1, "loss_scale_window": 1000}
OWN = config(
    3, zero=OFFLOAD, optimizer=ADAMW, scheduler={"type": "WarmupDecayLR", "params": WARMUP}
)
BEST = ("--eval_strategy", "steps", "--eval_steps", "2", "--load_best_model_at_end", "1")
FLOAT32 = ("--bf16", "0")
NO_WEIGHTS = {"stage3_gather_16bit_weights_on_model_save": False}
ONCE = ("--save_strategy", "no")
RUNS: dict[str, Run] = {
    "two": (TRAINER, config(2), ONCE),
    "three": (TRAINER, config(3), ()),
    "offloaded": (TRAINER, config(2, zero=OFFLOAD), ONCE),
    "own": (TRAINER, OWN, ("--warmup_steps", "2")),
    "fp16": (TRAINER, config(3, fp16=FP16, zero=NO_WEIGHTS), ("--fp16", "1", *ONCE)),
    "pretrained": (FROM_PRETRAINED, config(3), BEST),
    "evaluation": (EVALUATION, config(3, optimizer=ADAMW), ()),  # an optimizer that is left out
}
GRPO_WORDS = (
    *FLOAT32,
    *ONCE,
    "--num_generations",
    "2",
    "--max_completion_length",
    "6",
    "--beta",
    "0.1",
)
SERVER = ("--use_vllm", "1", "--vllm_mode", "server")
COLOCATE = ("--use_vllm", "1", "--vllm_mode", "colocate", "--vllm_enable_sleep_mode", "1")
WITH_TRL: dict[str, Run] = {
    "lora": (SFT, config(3), FLOAT32),
    "dpo": (DPO, config(3), (*FLOAT32, *ONCE)),
    "GRPO": (GRPO, config(3), GRPO_WORDS),
    "vllm_server": (VLLM, config(3), (*GRPO_WORDS, *SERVER)),
    "vllm_lora": (VLLM, config(3), (*GRPO_WORDS, *COLOCATE)),
    "vllm_lora_2": (VLLM, config(2), (*GRPO_WORDS, *COLOCATE)),
}
WITH_4_BITS: dict[str, Run] = {
    "qlora": (QLORA, config(3), ONCE),
    "qlora_2": (QLORA, config(2), ONCE),
}
LIBRARIES = ("trl", "peft", "datasets")
STEPWISE = (
    "--gradient_accumulation_steps",
    "1",
    "--data_seed",
    "1",
    "--eval_strategy",
    "steps",
    "--eval_steps",
    "2",
    *ONCE,
)
# leaves sequences split in its process
LAST: dict[str, Run] = {"ulysses": (ULYSSES, config(2, optimizer=ADAMW), STEPWISE)}


def resumed(name: str, text: str, ds: dict[str, Any], words: tuple[str, ...]) -> Run:
    return text, ds, (*words, "--resume_from_checkpoint", f"{name}/checkpoint-2")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all trainings have left, of one start."""
    folder = tmp_path_factory.mktemp("runs")
    save_tiny_model(folder / "saved")
    save_tiny_llama(folder / "llama")
    libraries = LIBRARIES if all(map(importlib.util.find_spec, LIBRARIES)) else ()
    runs = RUNS | (WITH_TRL if libraries else {})
    if libraries and importlib.util.find_spec("bitsandbytes"):
        runs |= WITH_4_BITS
    again = {
        f"{name}_resumed": resumed(name, *runs[name])
        for name in ("three", "own", "lora")
        if name in runs
    }
    return run(folder, runs | again | LAST, *libraries)


@pytest.mark.more
def test_names_and_metadata_are_shardcores_in_loaders_workers_too(found: dict[str, Any]) -> None:
    assert (
        found["said"].count("worker: ('0.19.8',) ('shardcore.deepspeed.initialize',) ('shardcore.")
        == 2
    )
    name, module = [line for line in found["said"].splitlines() if line.startswith("refused: ")]
    for line, what in ((name, "InferenceEngine"), (module, "inference")):
        assert line == (
            f"refused: No module named 'deepspeed.{what}': deepspeed is shardcore in this process "
            f"(--as-deepspeed), which has no counterpart of DeepSpeed's {what}; expected "
            f"shardcore.consolidate(...), and an inference engine of your choice"
        )


@pytest.mark.more
def test_trainer_has_the_numbers_of_ddp_and_resumes(tmp_path: Path, found: dict[str, Any]) -> None:
    ddp = run_plain(tmp_path, TRAINER, *ONCE)
    two, three = found["two"], found["three"]
    assert len(two["loss"]) == 4
    assert min(two["grad_norm"]) > 0.5, "clipped at every step"
    assert close(two, ddp)
    assert close(three, ddp)
    assert same_weights(two, three)
    assert same_weights(found["three_resumed"], three)
    assert found["three_resumed"]["grad_norm"] == three["grad_norm"]
    assert not close(two, run_plain(tmp_path, TRAINER, *ONCE, "--max_grad_norm", "1000")), (
        "a twin without clipping"
    )


@pytest.mark.more
def test_the_configurations_own_optimizer_and_scheduler_with_offload(found: dict[str, Any]) -> None:
    own = found["own"]
    assert max(own["learning_rate"]) == pytest.approx(0.01)
    assert min(own["learning_rate"]) == 0.0, "DeepSpeed's scheduler, not Trainer's"
    assert same_weights(found["own_resumed"], own)
    assert same_weights(found["offloaded"], found["two"]), (
        "torch's AdamW, which Accelerate replaces by DeepSpeedCPUAdam"
    )
    assert not same_weights(own, found["two"])


@pytest.mark.more
def test_pretrained_weights_at_stage_3_are_those_of_rank_0(
    tmp_path: Path, found: dict[str, Any]
) -> None:
    tiny_gpt2().save_pretrained(tmp_path / "saved")
    plain = run_plain(tmp_path, FROM_PRETRAINED, *BEST)
    assert found["pretrained"]["weights"]["transformer.wte.weight"].shape[0] == 48
    assert found["pretrained"]["loss"][0] == pytest.approx(plain["loss"][0], rel=1e-2), (
        "new rows are random"
    )


@pytest.mark.more
def test_overflow_of_float16_steps_no_scheduler_and_weights_stay_sharded(
    found: dict[str, Any],
) -> None:
    rates = found["fp16"]["learning_rate"]
    assert rates[0] == rates[1] == 0.01, "the first steps are skipped"
    assert "weights" not in found["fp16"], "as with DeepSpeed: only sharded"
    assert (found["folder"] / "fp16" / "latest").exists()


@pytest.mark.more
def test_evaluation_alone_at_stage_3(tmp_path: Path, found: dict[str, Any]) -> None:
    assert close(found["evaluation"], run_plain(tmp_path, EVALUATION))


@pytest.mark.more
def test_sequences_split_by_ulysses(tmp_path: Path, found: dict[str, Any]) -> None:
    alone = run_plain(tmp_path, ULYSSES, *STEPWISE, ranks=1)
    for name, count in (("loss", 4), ("eval_loss", 2)):
        assert len(alone[name]) == count
        assert found["ulysses"][name] == pytest.approx(alone[name], rel=2e-4)


# --- TRL ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_trl(found: dict[str, Any]) -> dict[str, Any]:
    for name in LIBRARIES:
        pytest.importorskip(name, reason="tests with TRL and PEFT")
    return found


@pytest.mark.more
def test_qlora_by_trainer_has_the_bits_of_stage_2(with_trl: dict[str, Any]) -> None:
    pytest.importorskip("bitsandbytes", reason="tests with bitsandbytes")
    three, two = with_trl["qlora"], with_trl["qlora_2"]
    assert three["loss"] == two["loss"]
    assert same_weights(three, two)
    assert any("lora" in name for name in three["weights"])


@pytest.mark.more
def test_adapters_by_trl_at_stage_3(tmp_path: Path, with_trl: dict[str, Any]) -> None:
    plain = run_plain(tmp_path, SFT, *FLOAT32)
    assert close(with_trl["lora"], plain)
    assert with_trl["lora"]["weights"].keys() == plain["weights"].keys()
    assert same_weights(with_trl["lora_resumed"], with_trl["lora"])


@pytest.mark.more
def test_trl_with_a_reference_model_at_stage_3(tmp_path: Path, with_trl: dict[str, Any]) -> None:
    assert close(with_trl["dpo"], run_plain(tmp_path, DPO, *FLOAT32, *ONCE))


@pytest.mark.more
def test_trl_that_generates_while_it_trains_at_stage_3(
    tmp_path: Path, with_trl: dict[str, Any]
) -> None:
    tiny_gpt2().save_pretrained(tmp_path / "saved")
    plain = run_plain(tmp_path, GRPO, *GRPO_WORDS)
    assert min(plain["grad_norm"]) > 0.0
    assert with_trl["GRPO"]["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5), (
        "the same texts were generated"
    )


@pytest.mark.more
def test_vllm_has_the_weights_of_forward(with_trl: dict[str, Any]) -> None:
    """The scripts compare them at each step."""
    for name in ("vllm_server", "vllm_lora"):
        assert min(with_trl[name]["grad_norm"]) > 0.0
    assert with_trl["vllm_lora"]["grad_norm"] == with_trl["vllm_lora_2"]["grad_norm"]
