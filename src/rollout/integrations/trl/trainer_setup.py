"""What a `GRPOTrainer` is told when it first asks for a rollout, and what it must not say itself.

TRL gives a rollout function neither a hook for weights nor a use of its log-probs, except beside
vLLM: a trainer that believes that it uses vLLM asks for new weights once a step, and corrects for
the difference between what sampled and what learns. So it is told so, after its construction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.config.config_faults import Fault, config_error
from rollout.config.section_type import given_fields
from rollout.integrations.trl.trainer_rewards import scoring_rollouts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rollout.config import RolloutConfig

#: Fields of `sampling` that TRL has under the same names.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
#: What TRL writes where a field of ours has its neutral value.
_NEUTRAL: dict[tuple[str, Any], Any] = {
    ("top_k", None): -1,
    ("top_k", 0): -1,
    ("min_p", None): 0.0,
}
_SUBJECT = "GRPOTrainer and its rollout_func"


class WeightSync:
    """Stands where TRL keeps vLLM: it is asked for weights once a step, and for nothing else."""

    def __init__(self, give: Callable[[], None]) -> None:
        self._give = give

    def sync_weights(self) -> None:
        """Give the engines what the trainer has learned."""
        self._give()


def sampling_of(trainer: Any) -> dict[str, Any]:
    """How the trainer wants tokens drawn, in our words."""
    said = {name: getattr(trainer.args, name) for name in _SAMPLING}
    return {
        name: _NEUTRAL.get((name, value), value)
        if value is None or name == "top_k"
        else float(value)
        for name, value in said.items()
    }


def take_tools(trainer: Any) -> list[Callable[..., Any]]:
    """The trainer's own tools; it does not call them any more."""
    tools, trainer.tools = list(trainer.tools or ()), []
    return tools


def take_over(trainer: Any, give_weights: Callable[[], None]) -> None:
    """Have the trainer ask for weights, use log-probs, and score what was rolled out."""
    trainer.vllm_generation = WeightSync(give_weights)
    trainer._last_loaded_step = -1
    trainer.vllm_mode = "server"
    trainer.use_vllm = True
    trainer.reward_funcs = [
        each if hasattr(each, "parameters") else scoring_rollouts(each)
        for each in trainer.reward_funcs
    ]


def check(trainer: Any, config: RolloutConfig) -> None:
    """Refuse what the two say differently, and what TRL would not be given.

    Raises:
        ConfigError: Names every such option.
    """
    faults = [*_refused(trainer), *_differing(trainer, config)]
    if faults:
        raise config_error(_SUBJECT, faults)


def _refused(trainer: Any) -> Iterator[Fault]:
    args = trainer.args
    if args.use_vllm:
        yield Fault("use_vllm", "expected False: the runtime has engines of its own", True)
    if getattr(trainer, "environment_factories", None) is not None:
        text = "expected none: give the runtime tools=[rollout.ToolSet(environment_factory)]"
        yield Fault("environment_factory", text)
    if getattr(args, "generation_kwargs", None):
        text = "expected none: the configuration's section `sampling` has what they would say"
        yield Fault("generation_kwargs", text, args.generation_kwargs)
    if args.loss_type == "vespo" and "token" not in args.vllm_importance_sampling_mode:
        text = "expected 'token_truncate' or 'token_mask' with loss_type = 'vespo'"
        yield Fault("vllm_importance_sampling_mode", text, args.vllm_importance_sampling_mode)
    if is_sharded(trainer.accelerator):
        text = "expected whole parameters in each process: sharded ones cannot be given to engines"
        yield Fault("accelerator", text, str(trainer.accelerator.distributed_type))


def _differing(trainer: Any, config: RolloutConfig) -> Iterator[Fault]:
    args, given = trainer.args, given_fields(config.sampling)
    for name, wanted in sampling_of(trainer).items():
        if name in given and getattr(config.sampling, name) != wanted:
            text = f"expected GRPOConfig.{name} = {getattr(args, name)!r}, or nothing"
            yield Fault(f"sampling.{name}", text, getattr(config.sampling, name))
    if "greedy" in given and config.sampling.greedy:
        yield Fault("sampling.greedy", "expected False: a policy in training samples", True)
    most = args.max_completion_length
    if most is not None and config.lengths.response > most:
        text = f"expected at most GRPOConfig.max_completion_length = {most}"
        yield Fault("lengths.response", text, config.lengths.response)
    wanted, own = args.chat_template_kwargs or {}, config.model.chat_template_kwargs
    if dict(wanted) != dict(own) and wanted:
        text = f"expected model.chat_template_kwargs, which is {dict(own)!r}"
        yield Fault("chat_template_kwargs", text, dict(wanted))


def is_sharded(accelerator: Any) -> bool:
    """Whether a process has parts of the parameters only."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return getattr(accelerator, "is_fsdp2", False) or (
        str(accelerator.distributed_type).endswith("FSDP")
        or (plugin is not None and plugin.zero_stage == 3)
    )


def named_weights(model: Any) -> dict[str, Any]:
    """A model's tensors by the names that checkpoints use; adapters must be merged already."""
    weights: dict[str, Any] = model.state_dict()
    if not is_adapted(model):
        return weights
    return {
        _name_in_base(name): tensor
        for name, tensor in weights.items()
        if model.prefix not in name and "original_module" not in name
    }


def is_adapted(model: Any) -> bool:
    """Whether it is a PEFT model, whose adapters stand beside its weights."""
    return hasattr(model, "merge_adapter") and hasattr(model, "prefix")


def _name_in_base(name: str) -> str:
    name = name.removeprefix("base_model.model.")
    for part in (".base_layer", "modules_to_save.default."):
        name = name.replace(part, "")
    return name
