"""accelerate's own tests of what it does with DeepSpeed."""

from __future__ import annotations

from tests.outside_suites.suite import GPU, HUB, WORKS, Suite

_SEQUENCES = "The engine does not divide sequences among processes."

SUITE = Suite(
    "accelerate",
    "https://github.com/huggingface/accelerate",
    "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83",  # July 2026: before 1.15.0
    of_messages=(
        (r"doesn't have NCCL built in", GPU),
        (r"there is no deepspeed\.runtime\.sequence_parallel here", _SEQUENCES),
    ),
    of_tests=(
        (r"::test_(basic_run|checkpointing|lr_scheduler|performance|train_multiple_models)$", HUB),
        (r"::test_save_checkpoints$", WORKS),
    ),
    needs=("parameterized",),
)
