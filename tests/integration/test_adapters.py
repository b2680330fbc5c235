"""PEFT: the life of adapters, switched, added, deleted, merged, in checkpoints; and its other methods. As in plain torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from infinity.errors import ModelError
from tests.exactness.lockstep import engine_on_nvme
from tests.stand_in.models import llama
from tests.twins import Twins

peft = pytest.importorskip("peft")


def _model(*adapters: str, **options: Any) -> Any:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    config = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False, **options)
    model = peft.get_peft_model(base, config, adapter_name=adapters[0])
    for name in adapters[1:]:
        model.add_adapter(name, config)
    return model


def _of(model: Any, *adapters: str) -> list[nn.Parameter]:
    return [p for fqn, p in model.named_parameters() if any(f".{name}." in fqn for name in adapters)]


def _loss(number: int) -> Callable[[Any], torch.Tensor]:
    """On each rank of a batch of its own."""
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(num_ranks * number + rank))
    return lambda model: model(inputs).square().mean()


def _average(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Plain torch averages gradients of ranks as the engine does."""
    for gradient in (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())


class _Both(Twins):
    """With the optimizer over ``members``."""

    def __init__(self, directory: Path, model: Any, members: Callable[[Any], list[nn.Parameter]]) -> None:
        super().__init__(directory, model, lambda each: torch.optim.AdamW(members(each), lr=1e-2))
        self.number = 0
        if dist.is_initialized():
            self.expected.register_step_pre_hook(_average)

    def next_step(self) -> None:
        self.step(_loss(self.number), by_hand=True)
        self.number += 1


def _everything(model: Any) -> list[nn.Parameter]:
    return list(model.parameters())


@pytest.mark.parametrize("members", [_everything, lambda model: _of(model, "one", "two")])
def test_adapters_that_are_switched(members: Any, tmp_path: Path) -> None:
    with _Both(tmp_path, _model("one", "two"), members) as both:
        for name in ("one", "two", "one", "two"):
            both.change(lambda model, _, name=name: model.set_adapter(name))
            both.next_step()
            both.next_step()
        both.require_equal()


def test_an_adapter_that_comes_into_a_group_when_it_is_switched_on(tmp_path: Path) -> None:
    with _Both(tmp_path, _model("one", "two"), lambda model: _of(model, "one")) as both:
        both.next_step()
        both.change(lambda model, _: model.set_adapter("two"))
        both.change(lambda model, optimizer: optimizer.add_param_group({"params": _of(model, "two"), "lr": 1e-3}))
        both.next_step()
        both.change(lambda model, _: model.set_adapter("one"))
        both.next_step()
        both.require_equal()


def test_an_adapter_that_is_added_after_initialize(tmp_path: Path) -> None:
    both = _Both(tmp_path, _model("one"), lambda model: _of(model, "one"))
    config = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)
    with both:
        both.next_step()
        both.change(lambda model, _: model.add_adapter("two", config))
        both.change(lambda model, _: model.set_adapter("two"))
        both.change(lambda model, optimizer: optimizer.add_param_group({"params": _of(model, "two")}))
        both.next_step()
        both.change(lambda model, _: model.set_adapter("one"))
        both.next_step()
        both.require_equal()


def test_adapters_that_are_merged_and_deleted(tmp_path: Path) -> None:
    with _Both(tmp_path, _model("one", "two"), lambda model: _of(model, "one", "two")) as both:
        both.next_step()
        both.change(lambda model, _: model.merge_adapter(["one"]))
        both.change(lambda model, _: model.unmerge_adapter())
        both.next_step()
        both.change(lambda model, _: model.set_adapter("two"))
        both.next_step()
        both.change(lambda model, _: model.delete_adapter("one"))
        both.next_step()
        both.require_equal(has_states=False)


def test_adapters_that_are_merged_and_unloaded(tmp_path: Path) -> None:
    with _Both(tmp_path, _model("one", "two"), _everything) as both:
        both.next_step()
        both.change(lambda model, _: model.set_adapter("two"))
        both.next_step()
        weights, expected = (model.merge_and_unload(adapter_names=["one", "two"]) for model, _ in both.sides)
        for name, value in expected.state_dict().items():
            assert torch.equal(weights.state_dict()[name], value), name
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            assert torch.equal(weights(inputs), expected(inputs))


def test_a_checkpoint_that_is_loaded_while_another_adapter_is_active(tmp_path: Path) -> None:
    with _Both(tmp_path / "first", _model("one", "two"), _everything) as both:
        both.next_step()
        both.change(lambda model, _: model.set_adapter("two"))
        both.next_step()
        both.engine.save_checkpoint(str(tmp_path / "saved"))
    other = _model("one", "two")
    other.set_adapter("two")
    with _Both(tmp_path / "second", other, _everything) as again:
        again.engine.load_checkpoint(str(tmp_path / "saved"))
        again.plain, again.expected, again.number = both.plain, both.expected, both.number
        again.sides[1] = both.sides[1]
        again.change(lambda model, _: model.set_adapter("one"))
        again.next_step()
        again.require_equal()


def test_states_of_an_adapter_in_no_group_are_not_dropped_by_a_load(tmp_path: Path) -> None:
    with _Both(tmp_path / "first", _model("one", "two"), lambda model: _of(model, "one", "two")) as both:
        both.next_step()
        both.engine.save_checkpoint(str(tmp_path / "saved"))
    other = _model("one", "two")
    other.set_adapter("two")
    with _Both(tmp_path / "second", other, lambda model: _of(model, "two")) as again:
        before = {name: value.clone() for name, value in other.state_dict().items()}
        with pytest.raises(ValueError, match=r"lora_A\.one\.weight.*in none of this one"):
            again.engine.load_checkpoint(str(tmp_path / "saved"))
        assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
        again.next_step()


def test_a_base_weight_that_was_trained_keeps_its_states_when_an_adapter_comes(tmp_path: Path) -> None:
    def members(model: Any) -> list[nn.Parameter]:
        bias = model.base_model.model[2].base_layer.bias
        bias.requires_grad_(True)
        return [*_of(model, "one"), bias]

    with _Both(tmp_path, _model("one", "two"), members) as both:
        both.next_step()
        both.change(lambda model, _: model.base_model.model[2].base_layer.bias.requires_grad_(False))
        both.change(lambda model, _: model.set_adapter("two"))
        both.change(lambda model, optimizer: optimizer.add_param_group({"params": _of(model, "two")}))
        both.next_step()
        both.change(lambda model, _: model.base_model.model[2].base_layer.bias.requires_grad_(True))
        both.next_step()
        both.require_equal()


def test_a_group_that_is_refused_leaves_everything_as_it_was(tmp_path: Path) -> None:
    with _Both(tmp_path, _model("one", "two", "three"), lambda model: _of(model, "one", "two")) as both:
        both.next_step()
        both.model.delete_adapter("two")  # its parameters have room
        with pytest.raises(ModelError, match="taken out of the model"):
            both.optimizer.add_param_group({"params": _of(both.model, "three")})
        both.plain.delete_adapter("two")
        both.next_step()
        assert len(both.optimizer.param_groups) == 1
        both.require_equal(has_states=False)


_LINEAR = {"target_modules": ["q_proj", "v_proj"]}
_PROMPT = {"num_virtual_tokens": 4}
_FEED_FORWARD = {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
_SCHEDULE = {"total_step": 10, "tinit": 0, "tfinal": 2, "deltaT": 1, "init_r": 4, "target_r": 1}
_METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt": ("PromptTuningConfig", _PROMPT),
    "prompts of tasks": ("MultitaskPromptTuningConfig", {**_PROMPT, "num_tasks": 2}),
    "prefix": ("PrefixTuningConfig", _PROMPT),
    "prefix, projected": ("PrefixTuningConfig", {**_PROMPT, "prefix_projection": True, "encoder_hidden_size": 16}),
    "P-tuning": ("PromptEncoderConfig", {**_PROMPT, "encoder_hidden_size": 16}),
    "P-tuning, LSTM": ("PromptEncoderConfig", {**_PROMPT, "encoder_reparameterization_type": "LSTM"}),
    "adaption prompt": ("AdaptionPromptConfig", {"adapter_len": 4, "adapter_layers": 1}),
    "IA3": ("IA3Config", _FEED_FORWARD),
    "LoHa": ("LoHaConfig", {**_LINEAR, "r": 2}),
    "LoKr": ("LoKrConfig", {**_LINEAR, "r": 2}),
    "OFT": ("OFTConfig", {**_LINEAR, "oft_block_size": 4}),
    "BOFT": ("BOFTConfig", {**_LINEAR, "boft_block_size": 4}),
    "VeRA": ("VeraConfig", {**_LINEAR, "r": 2}),
    "AdaLoRA": ("AdaLoraConfig", {**_LINEAR, **_SCHEDULE}),
    "DoRA": ("LoraConfig", {**_LINEAR, "r": 2, "use_dora": True}),
    "LoRA on a parameter": ("LoraConfig", {"target_modules": [], "target_parameters": ["mlp.up_proj.weight"]}),
    "Fourier": ("FourierFTConfig", {**_LINEAR, "n_frequency": 10}),
    "reflections": ("HRAConfig", {**_LINEAR, "r": 2}),
    "vector bank": ("VBLoRAConfig", {**_LINEAR, "num_vectors": 16, "vector_length": 4}),
    "norms": ("LNTuningConfig", {"target_modules": ["input_layernorm"]}),
    "tokens": ("TrainableTokensConfig", {"target_modules": ["embed_tokens"], "token_indices": [1, 2, 5]}),
}


def _make_method(method: str) -> tuple[Any, torch.optim.Optimizer]:
    model = llama()
    kind, options = _METHODS[method]
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of CUDA's compiler, of values that are set to others
        model = peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", **options))
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def _train_method(method: str, model: Any, optimizer: Any) -> list[torch.Tensor]:
    losses = []
    for number in range(3):
        tokens = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(number))
        tasks = {"task_ids": torch.tensor([0, 1])} if method == "prompts of tasks" else {}
        loss = model(input_ids=tokens, labels=tokens, **tasks).loss
        loss.backward()
        optimizer.step()
        if method == "AdaLoRA":  # which ranks weights by their gradients
            model.base_model.update_and_allocate(number)
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def _generate(method: str, model: Any) -> torch.Tensor:
    tasks = {"task_ids": torch.tensor([0])} if method == "prompts of tasks" else {}
    words: torch.Tensor = model.eval().generate(
        input_ids=torch.arange(3, 11)[None], max_new_tokens=4, do_sample=False, pad_token_id=0, **tasks
    )
    return words


@pytest.mark.deep(but=1)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("method", _METHODS)
def test_a_method_of_peft_is_trained_as_in_plain_torch(method: str, tmp_path: Path) -> None:
    plain, plain_optimizer = _make_method(method)
    expected = _train_method(method, plain, plain_optimizer)
    model, optimizer = _make_method(method)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with engine_on_nvme(tmp_path, model, optimizer=optimizer):
        assert torch.equal(torch.stack(_train_method(method, model, optimizer)), torch.stack(expected))
        weights = model.state_dict()
        assert weights.keys() == plain.state_dict().keys()
        for name, value in plain.state_dict().items():
            assert torch.equal(weights[name], value), name
        assert any(not torch.equal(value, before[name]) for name, value in weights.items())
        states = optimizer.state_dict()["state"]
        for key, entry in plain_optimizer.state_dict()["state"].items():
            for name, value in entry.items():
                assert torch.equal(states[key][name], value), (key, name)
        assert torch.equal(_generate(method, model), _generate(method, plain))
        saved = peft.get_peft_model_state_dict(model)
        for name, value in peft.get_peft_model_state_dict(plain).items():
            assert torch.equal(saved[name], value), name
