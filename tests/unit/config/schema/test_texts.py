"""Each key of the config has a text that says what it does."""

from __future__ import annotations

import config_reference

from infinity.config.schema.blocks import RootBlock
from infinity.config.schema.vocabulary import child_block


def test_every_key_with_an_effect_says_what_it_does() -> None:
    for path, block in config_reference.blocks(RootBlock):
        texts = config_reference.texts_of(block)
        for name, field in block.model_fields.items():
            if config_reference.has_effect(field) and child_block(field) is None:
                assert texts.get(name), path + name
