"""Lightning's own tests of its DeepSpeed strategies."""

from __future__ import annotations

from tests.outside_suites.suite import GPU, INSIDE, PRIVATE, Suite

_SCALE = "The engine refuses optimizer.step() with fp16: engine.step() has to adjust the loss scale."
_SCRIPT = "The engine writes no zero_to_fp32.py beside a checkpoint: the module of that name reads it."
_THEIRS = "DeepSpeed refuses these arguments as well."

SUITE = Suite(
    "lightning",
    "https://github.com/Lightning-AI/pytorch-lightning",
    "be98784a1a03581b7051a355ae1084fd352d7cea",  # 2.6.5
    of_messages=(
        (r"there is no deepspeed\.[\w.]+ here", PRIVATE),
        (r"assert 'cpu' == 'cuda'", GPU),
        (r"with fp16 the loss scale has to follow each step", _SCALE),
        (r"KeyError: 'fp32_flat_groups'|assert 'ds_version' in", INSIDE),
        (r"contiguous checkpointing needs the number of checkpoints", _THEIRS),
    ),
    of_tests=(
        (r"::test_deepspeed_multiple_models$", INSIDE),
        (r"::test_deepspeed_multi_save_same_filepath$", _SCRIPT),
    ),
    needs=("scikit-learn",),
)
